//! Devices that a machine was given, or lost, while it ran: the command line that others are
//! started with does not tell.

use serde::Deserialize;
use serde_json::{Value, json};

use super::command;
use super::qmp::Qmp;
use crate::{Error, Result};

/// Places of the requested devices in QEMU: those with a name, and the others.
pub(crate) const PLACES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// A device that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// Its place in QEMU.
    pub place: &'static str,
    /// Its name there.
    pub name: String,
    /// Its type, as `virtio-net-pci`.
    pub kind: String,
}

#[derive(Deserialize)]
struct Child {
    name: String,
    #[serde(rename = "type")]
    kind: String,
}

/// The devices of a machine.
pub(crate) fn devices(qmp: &mut Qmp) -> Result<Vec<Device>> {
    let mut devices = Vec::new();
    for place in PLACES {
        let children: Vec<Child> = qmp.call("qom-list", json!({ "path": place }))?;
        devices.extend(children.into_iter().filter_map(|child| {
            let kind = child.kind.strip_prefix("child<")?.strip_suffix('>')?;
            Some(Device {
                place,
                name: child.name,
                kind: kind.to_owned(),
            })
        }));
    }
    Ok(devices)
}

/// The differences between a machine and its command line `words`: devices that were plugged in or
/// unplugged, each by its name.
pub(crate) fn differences(
    qmp: &mut Qmp,
    devices: &[Device],
    words: &[String],
) -> Result<Vec<String>> {
    let question = |device: &Device| {
        let path = format!("{}/{}", device.place, device.name);
        ("qom-get", json!({"path": path, "property": "hotplugged"}))
    };
    qmp.foresee(devices.iter().map(question).collect())?;
    let mut differences = Vec::new();
    for device in devices {
        let (command, with) = question(device);
        let is_plugged = match qmp.call::<Value>(command, with) {
            Ok(told) => told != Value::Bool(false),
            // A device without the property counts as plugged in: the command line may not make it.
            Err(Error::Refused { .. }) => true,
            Err(error) => return Err(error),
        };
        if is_plugged {
            differences.push(format!("{} ({})", device.name, device.kind));
        }
    }
    differences.extend(unplugged(devices, words));
    Ok(differences)
}

/// The devices of a command line that are gone.
fn unplugged(devices: &[Device], words: &[String]) -> Vec<String> {
    let is_there = |name: &str| {
        let named = |device: &Device| device.place == PLACES[0] && device.name == name;
        devices.iter().any(named)
    };
    let mut gone = command::device_names(words);
    gone.retain(|name| !is_there(name));
    let mut gone = { gone }
        .iter()
        .map(|name| format!("{name} (unplugged)"))
        .collect::<Vec<_>>();
    // QEMU numbers the others from 0 on.
    let nameless = devices.iter().filter(|device| device.place == PLACES[1]);
    let numbers = nameless.filter_map(|device| {
        let number = device.name.strip_prefix("device[")?.strip_suffix(']')?;
        number.parse::<usize>().ok()
    });
    let mut numbers = numbers.collect::<Vec<_>>();
    numbers.sort_unstable();
    let end = numbers.last().map_or(0, |last| last + 1);
    let missing = (0..end).filter(|number| numbers.binary_search(number).is_err());
    gone.extend(missing.map(|number| format!("device[{number}] (unplugged)")));
    gone
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(place: usize, name: &str) -> Device {
        Device {
            place: PLACES[place],
            name: name.to_owned(),
            kind: "virtio-net-pci".to_owned(),
        }
    }

    #[test]
    fn a_device_that_is_gone_is_told_by_its_name() {
        let words = [
            "-device",
            "virtio-net-pci,id=net0",
            "-device",
            r#"{"driver":"virtio-blk-pci","id":"disk0"}"#,
            "-device",
            "virtio-rng-pci",
        ];
        let words = words.map(str::to_owned);
        let all = [
            device(0, "net0"),
            device(0, "disk0"),
            device(1, "device[0]"),
            device(1, "device[1]"),
        ];
        assert_eq!(unplugged(&all, &words), [""; 0]);
        assert_eq!(unplugged(&all[1..], &words), ["net0 (unplugged)"]);
        assert_eq!(
            unplugged(&[all[0].clone(), all[3].clone()], &words),
            ["disk0 (unplugged)", "device[0] (unplugged)"]
        );
    }
}
