//! QEMU's command line: what of it is recorded, and what a restored machine is started with.
//!
//! Words are taken as QEMU takes them: options begin with one dash or two, their values are fields
//! between commas (a comma in a value is written twice) or, of some, JSON. What nobody here has to
//! know stays as it is.

use serde_json::{Value, json};

/// The word in place of a secret.
const WITHHELD: &str = "withheld-by-stillframe";

/// Options whose value may begin with a dash, or have any form: they are passed over with it.
const FREE: [&str; 3] = ["append", "fw_cfg", "smbios"];

/// Keys of options whose values are secrets.
const SECRETS: [&str; 3] = ["password", "passwd", "proxy-password"];

/// A machine's memory as its command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// The object of QEMU.
    pub backend: String,
    pub bytes: u64,
    /// The descriptor that QEMU inherits.
    pub descriptor: i32,
}

/// How a command line is changed for a restored machine.
#[derive(Clone, Debug)]
pub(crate) struct Change<'a> {
    pub memory: &'a [Memory],
    /// True if the memory is QEMU's alone: what it writes is not in the file.
    pub private: bool,
    /// The descriptor of the socket of its monitor.
    pub monitor: i32,
    /// Its name, where it gets one.
    pub name: Option<&'a str>,
}

/// One option of a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Word {
    /// Its name without dashes; none for what is no option.
    option: Option<String>,
    /// As it was written.
    words: Vec<String>,
}

impl Word {
    pub fn value(&self) -> &str {
        self.words.get(1).map_or("", String::as_str)
    }

    pub fn is(&self, names: &[&str]) -> bool {
        let option = self.option.as_deref();
        option.is_some_and(|option| names.contains(&option))
    }

    pub fn set(&mut self, value: String) {
        self.words.truncate(1);
        self.words.push(value);
    }
}

pub(super) fn split(words: &[String]) -> Vec<Word> {
    let mut all = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let option = word.strip_prefix("--").or_else(|| word.strip_prefix('-'));
        let option = option.filter(|name| !name.is_empty()).map(str::to_owned);
        let mut own = vec![word.clone()];
        if let Some(name) = &option {
            let free = FREE.contains(&name.as_str());
            let value = words.next_if(|next| free || !next.starts_with('-'));
            own.extend(value.cloned());
        }
        all.push(Word { option, words: own });
    }
    all
}

pub(super) fn join(all: Vec<Word>) -> Vec<String> {
    all.into_iter().flat_map(|word| word.words).collect()
}

/// The fields of an option's value: keys, and what they are set to.
pub(super) fn fields(value: &str) -> Vec<(String, Option<String>)> {
    let mut fields = vec![String::new()];
    let mut letters = value.chars().peekable();
    while let Some(letter) = letters.next() {
        let last = fields.last_mut().expect("there is always one");
        match letter {
            ',' if letters.next_if_eq(&',').is_some() => last.push(','),
            ',' => fields.push(String::new()),
            other => last.push(other),
        }
    }
    let field = |field: String| match field.split_once('=') {
        Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
        None => (field, None),
    };
    fields.into_iter().map(field).collect()
}

pub(super) fn written(fields: &[(String, Option<String>)]) -> String {
    let field = |(key, value): &(String, Option<String>)| match value {
        Some(value) => format!("{key}={}", value.replace(',', ",,")),
        None => key.replace(',', ",,"),
    };
    fields.iter().map(field).collect::<Vec<_>>().join(",")
}

/// Returns an object's type, its name, and its properties.
fn object(value: &str) -> (String, String, Vec<(String, Value)>) {
    let text = |all: &[(String, Value)], key: &str| {
        let found = all.iter().find(|field| field.0 == key);
        found
            .and_then(|field| field.1.as_str())
            .unwrap_or_default()
            .to_owned()
    };
    let all = match serde_json::from_str::<Value>(value) {
        Ok(Value::Object(all)) => all.into_iter().collect::<Vec<_>>(),
        _ => fields(value)
            .into_iter()
            .map(|(key, value)| match value {
                Some(value) => (key, Value::String(value)),
                None => ("qom-type".to_owned(), Value::String(key)),
            })
            .collect(),
    };
    (text(&all, "qom-type"), text(&all, "id"), all)
}

/// Leaves secrets out of a command line; gives the numbers of the words that lack one.
pub(crate) fn withhold(words: &mut Vec<String>) -> Vec<u32> {
    let mut all = split(words);
    let mut withheld = Vec::new();
    let mut number = 0;
    for word in &mut all {
        let is_secret = word.is(&["object"]) && object(word.value()).0.starts_with("secret");
        let value = word.words.get(1).cloned();
        if let Some(value) = value.filter(|value| is_secret || has_secret(value)) {
            let kind = value.split([',', '=']).next().unwrap_or_default();
            let kind = if is_secret { "secret" } else { kind };
            word.set(format!("{kind},{WITHHELD}"));
            withheld.push(number + 1);
        }
        number += word.words.len() as u32;
    }
    *words = join(all);
    withheld
}

fn has_secret(value: &str) -> bool {
    let is_secret = |(key, value): &(String, Option<String>)| {
        let name = key.rsplit('.').next().unwrap_or(key);
        value.is_some() && SECRETS.contains(&name)
    };
    let in_json = |name: &str| value.contains(&format!("\"{name}\""));
    let of_address = || {
        let rest = value.split_once("://").map_or("", |(_, rest)| rest);
        let place = rest.split(['/', ',']).next().unwrap_or_default();
        place
            .split_once('@')
            .is_some_and(|(who, _)| who.contains(':'))
    };
    fields(value).iter().any(is_secret) || SECRETS.iter().any(|name| in_json(name)) || of_address()
}

/// Makes a recorded command line one that can be changed for restored machines: without what
/// belongs to the saved process alone, and with the very machine type that it had.
///
/// `many`: whether there are to be several of them; `has_disks`: whether they get what the image
/// has of the disks.
///
/// # Errors
/// Which option cannot be had again, and why.
pub(crate) fn recorded(
    words: &[String],
    machine: &str,
    many: bool,
    has_disks: bool,
) -> Result<Vec<String>, String> {
    let mut all = split(words);
    let is_control = |word: &Word| {
        let control = (Some("control".to_owned()), "mode".to_owned());
        word.is(&["mon"])
            && fields(word.value())
                .iter()
                .any(|it| (it.1.clone(), it.0.clone()) == control)
    };
    let monitors = all.iter().filter(|word| is_control(word));
    let monitors = monitors.filter_map(|word| {
        let positional = fields(word.value()).into_iter().next()?;
        of(word, "chardev").or(Some(positional.0))
    });
    let monitors = monitors.collect::<Vec<_>>();
    all.retain(|word| {
        let is_monitors =
            word.is(&["chardev"]) && of(word, "id").is_some_and(|id| monitors.contains(&id));
        let own = ["qmp", "qmp-pretty", "daemonize", "pidfile", "loadvm", "S"];
        !word.is(&own) && !is_control(word) && !is_monitors
    });
    let mut typed = false;
    for word in all.iter_mut().filter(|word| word.is(&["M", "machine"])) {
        let mut fields = fields(word.value());
        match fields.first_mut() {
            Some((_, value @ None)) => fields[0] = (machine.to_owned(), value.take()),
            Some((key, Some(_))) if key == "type" => fields[0].1 = Some(machine.to_owned()),
            _ => continue,
        }
        typed = true;
        word.set(written(&fields));
    }
    if !typed {
        all.extend(pair("-machine", format!("type={machine}")));
    }
    for word in &all {
        let option = || word.words.join(" ");
        if fields(word.value())
            .iter()
            .any(|(key, _)| key == "fd" || key == "fds")
        {
            return Err(format!(
                "{} names a descriptor of the saved process",
                option()
            ));
        }
        let temporary =
            word.is(&["snapshot"]) || (word.is(&["drive"]) && is_temporary(word.value()));
        if temporary && !has_disks {
            return Err(format!(
                "{} gives a new machine disks without what the saved one had written to them",
                option()
            ));
        }
        if many && is_at_a_place(word) {
            return Err(format!("{} would be the same for every machine", option()));
        }
    }
    Ok(join(all))
}

/// The value of `key` in a word.
fn of(word: &Word, key: &str) -> Option<String> {
    let mut fields = fields(word.value()).into_iter();
    let field = fields.find(|field| field.0 == key);
    field.and_then(|field| field.1)
}

/// The names of a command line's devices.
pub(crate) fn device_names(words: &[String]) -> Vec<String> {
    let devices = split(words).into_iter().filter(|word| word.is(&["device"]));
    let names = devices.map(|word| object(word.value()).1);
    names.filter(|name| !name.is_empty()).collect()
}

/// True if a command line has an object of this name.
pub(crate) fn has_object(words: &[String], name: &str) -> bool {
    let mut objects = split(words).into_iter().filter(|word| word.is(&["object"]));
    objects.any(|word| object(word.value()).1 == name)
}

/// True if a QEMU that is started with this command line gives its user up by itself.
pub(crate) fn names_user(words: &[String]) -> bool {
    split(words).iter().any(|word| {
        let names_it = || fields(word.value()).iter().any(|field| field.0 == "user");
        word.is(&["runas"]) || (word.is(&["run-with"]) && names_it())
    })
}

/// Tells whether what is written to a drive is gone with its QEMU.
fn is_temporary(value: &str) -> bool {
    let is_on = |value: &Option<String>| value.as_deref().is_none_or(|value| value == "on");
    let fields = fields(value);
    fields
        .iter()
        .any(|(key, value)| key == "snapshot" && is_on(value))
}

/// Tells whether an option gives a machine a place of its own: a socket, a file to write to, a
/// port.
fn is_at_a_place(word: &Word) -> bool {
    let lines = ["serial", "parallel", "monitor", "debugcon", "gdb", "qtest"];
    let value = word.value();
    let is_line = [
        "unix:",
        "file:",
        "tcp:",
        "udp:",
        "telnet:",
        "websocket:",
        "pipe:",
    ];
    let is_place = |(key, value): &(String, Option<String>)| {
        ["path", "port", "hostfwd", "ifname"].contains(&key.as_str()) && value.is_some()
    };
    (word.is(&lines) && is_line.iter().any(|start| value.starts_with(start)))
        || word.is(&["vnc", "spice"])
        || (word.is(&["chardev", "netdev", "nic", "net"]) && fields(value).iter().any(is_place))
}

/// The unix sockets at which a machine would listen: QEMU takes their places from whoever does.
pub(crate) fn listening_at(words: &[String]) -> Vec<String> {
    let places = split(words).into_iter().filter_map(|word| {
        let fields = fields(word.value());
        let is_server = fields.iter().any(|(key, value)| {
            let is_on = value.as_deref().is_none_or(|value| value == "on");
            key == "server" && is_on
        });
        let first = fields.first().map(|field| field.0.as_str());
        let place = match first.and_then(|first| first.strip_prefix("unix:")) {
            Some(place) => Some(place.to_owned()),
            None if word.is(&["chardev"]) => {
                let path = fields.into_iter().find(|field| field.0 == "path");
                path.and_then(|field| field.1)
            }
            None => None,
        };
        place.filter(|_| is_server)
    });
    places.collect()
}

/// Puts a clone's number and name where `{n}` and `{name}` stand.
pub(crate) fn fill_in(words: &[String], number: u32, name: &str) -> Vec<String> {
    let number = number.to_string();
    let one = |word: &String| word.replace("{n}", &number).replace("{name}", name);
    words.iter().map(one).collect()
}

/// The command line of a restored machine: its memory and its monitor are descriptors, and it waits
/// for the state of its devices.
///
/// # Errors
/// Which backend has no object.
pub(crate) fn change(words: &[String], how: &Change<'_>) -> Result<Vec<String>, String> {
    let mut all = split(words);
    // One that leaves its process could not be ended; it has a session of its own as it is.
    let ours: &[&str] = match how.private {
        true => &["incoming", "daemonize", "mem-prealloc"],
        false => &["incoming", "daemonize"],
    };
    all.retain(|word| !word.is(ours));
    for memory in how.memory {
        let is_it =
            |word: &&mut Word| word.is(&["object"]) && object(word.value()).1 == memory.backend;
        let Some(word) = all.iter_mut().find(is_it) else {
            let backend = &memory.backend;
            return Err(format!(
                "there is no -object with id={backend} for the memory of that name"
            ));
        };
        let (.., fields) = object(word.value());
        word.set(memory_object(memory, how.private, fields));
    }
    for word in all.iter_mut().filter(|word| word.is(&["device"])) {
        if let Some(value) = new_generation(word.value()) {
            word.set(value);
        }
    }
    if let Some(name) = how.name {
        all.retain(|word| !word.is(&["name"]));
        all.extend(pair("-name", format!("guest={}", name.replace(',', ",,"))));
    }
    let monitor = how.monitor;
    let line = format!("socket,id=stillframe-monitor,fd={monitor},server=on,wait=off");
    all.extend(pair("-chardev", line));
    all.extend(pair(
        "-mon",
        "chardev=stillframe-monitor,mode=control".to_owned(),
    ));
    all.extend(pair("-incoming", "defer".to_owned()));
    Ok(join(all))
}

/// A device that tells the guest that it is another machine now, with an id of its own.
fn new_generation(value: &str) -> Option<String> {
    if let Ok(Value::Object(mut device)) = serde_json::from_str::<Value>(value) {
        let is_it = device.get("driver").is_some_and(|it| it == "vmgenid");
        device.insert("guid".to_owned(), json!("auto"));
        return is_it.then(|| Value::Object(device).to_string());
    }
    let mut fields = fields(value);
    let (driver, _) = fields.first()?;
    if driver != "vmgenid" {
        return None;
    }
    fields.retain(|(key, _)| key != "guid");
    fields.push(("guid".to_owned(), Some("auto".to_owned())));
    Some(written(&fields))
}

/// The object whose memory is a descriptor; what does not depend on the file stays.
fn memory_object(memory: &Memory, private: bool, fields: Vec<(String, Value)>) -> String {
    const KEPT: [&str; 6] = [
        "merge",
        "dump",
        "reserve",
        "policy",
        "host-nodes",
        "x-use-canonical-path-for-ramblock-id",
    ];
    let kept = fields
        .into_iter()
        .filter(|(key, _)| KEPT.contains(&key.as_str()));
    let mut object = serde_json::Map::new();
    for (key, value) in kept {
        let value = match value.as_str() {
            Some("on" | "yes" | "true") => json!(true),
            Some("off" | "no" | "false") => json!(false),
            _ => value,
        };
        object.insert(key, value);
    }
    object.insert("qom-type".to_owned(), json!("memory-backend-file"));
    object.insert("id".to_owned(), json!(memory.backend));
    object.insert("size".to_owned(), json!(memory.bytes));
    let path = format!("/proc/self/fd/{}", memory.descriptor);
    object.insert("mem-path".to_owned(), json!(path));
    object.insert("share".to_owned(), json!(!private));
    Value::Object(object).to_string()
}

fn pair(option: &str, value: String) -> Option<Word> {
    split(&[option.to_owned(), value]).pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn secrets_are_left_out() {
        let line = "-object secret,id=s,data=hunter2 -m 400 \
                    -object {\"qom-type\":\"secret\",\"id\":\"t\",\"data\":\"x\"} \
                    -spice port=1,password=hunter2 -drive file=http://me:hunter2@host/x \
                    -append -password=1 -vnc :1,password=on";
        let mut all = words(line);
        let withheld = withhold(&mut all);
        let expected = "-object secret,withheld-by-stillframe -m 400 \
                        -object secret,withheld-by-stillframe \
                        -spice port,withheld-by-stillframe -drive file,withheld-by-stillframe \
                        -append -password=1 -vnc :1,withheld-by-stillframe";
        assert_eq!(all.join(" "), expected);
        assert_eq!(withheld, [1, 5, 7, 9, 13]);
    }

    #[test]
    fn a_recorded_line_loses_what_was_the_saved_processs_own() {
        let line = "-M q35,accel=tcg -qmp unix:/q,server=on -S -daemonize -pidfile /p \
                    -chardev socket,id=mon,path=/m,server=on -mon chardev=mon,mode=control \
                    -chardev stdio,id=c -incoming defer disk.img";
        let kept = recorded(&words(line), "pc-q35-7.2", false, false).expect("it can be had");
        assert_eq!(
            kept.join(" "),
            "-M pc-q35-7.2,accel=tcg -chardev stdio,id=c -incoming defer disk.img"
        );
        let line = "-machine type=pc,memory-backend=mem -machine usb=on";
        let kept = recorded(&words(line), "pc-i440fx-7.2", true, false).expect("it can be had");
        assert_eq!(
            kept.join(" "),
            "-machine type=pc-i440fx-7.2,memory-backend=mem -machine usb=on"
        );
        let kept = recorded(&words("-m 5"), "x", true, false).expect("it can be had");
        assert_eq!(kept.join(" "), "-m 5 -machine type=x");
    }

    #[test]
    fn a_restored_machine_is_told_to_be_another_one() {
        let new = |value| new_generation(value);
        let line = "vmgenid,guid=1,id=x";
        assert_eq!(new(line).as_deref(), Some("vmgenid,id=x,guid=auto"));
        let json = r#"{"driver":"vmgenid","guid":"1"}"#;
        assert_eq!(
            new(json).as_deref(),
            Some(r#"{"driver":"vmgenid","guid":"auto"}"#)
        );
        assert_eq!(new("virtio-net-pci,mac=1"), None);
        assert_eq!(new(""), None);
    }

    #[test]
    fn what_only_one_can_have_is_refused_for_many() {
        for line in [
            "-serial unix:/x,server=on",
            "-chardev socket,id=x,path=/x",
            "-netdev user,id=n,hostfwd=tcp::1-:2",
            "-vnc :1",
        ] {
            recorded(&words(line), "pc", false, false).expect(line);
            let error = recorded(&words(line), "pc", true, false).expect_err(line);
            assert!(error.starts_with(line), "{error}");
        }
        for line in [
            "-snapshot",
            "-drive file=a,snapshot=on",
            "-drive snapshot,file=a",
        ] {
            let error = recorded(&words(line), "pc", false, false).expect_err(line);
            assert!(error.starts_with(line), "{error}");
        }
        recorded(&words("-drive file=a,snapshot=off"), "pc", false, false).expect("it stays");
        // The image has the contents of the temporary disk.
        let line = words("-drive file=a,snapshot=on -machine pc");
        assert_eq!(recorded(&line, "pc", false, true), Ok(line));
        let error = recorded(&words("-netdev tap,fd=3,id=n"), "pc", false, false);
        assert!(error.expect_err("a descriptor").contains("descriptor"));
    }

    #[test]
    fn names_are_those_of_devices_objects_and_users() {
        let line = words(
            "-device a,id=x -device {\"driver\":\"b\",\"id\":\"y\"} -device c \\
             -object memory-backend-ram,id=m,size=1M",
        );
        assert_eq!(device_names(&line), ["x", "y"]);
        assert!(has_object(&line, "m") && !has_object(&line, "x"));
        for (line, names) in [
            ("-runas nobody", true),
            ("-run-with chroot=/x,user=nobody", true),
            ("-run-with async-teardown=on", false),
            ("-name runas", false),
        ] {
            assert_eq!(names_user(&words(line)), names, "{line}");
        }
    }

    #[test]
    fn memory_becomes_a_descriptor() {
        let line = "-object memory-backend-memfd,id=mem,size=400M,share=on,prealloc=on,merge=off \
                    -object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"other\",\"size\":5} \
                    -name old -incoming tcp:0:1 -daemonize";
        let memory = [("mem", 7), ("other", 8)].map(|(backend, descriptor)| Memory {
            backend: backend.to_owned(),
            bytes: 4096,
            descriptor,
        });
        let how = Change {
            memory: &memory,
            private: true,
            monitor: 9,
            name: Some("a,b"),
        };
        let changed = change(&words(line), &how).expect("it is all there");
        let object = |id: &str, fd: u32, more: &str| {
            format!(
                "{{\"id\":\"{id}\",\"mem-path\":\"/proc/self/fd/{fd}\",{more}\
                 \"qom-type\":\"memory-backend-file\",\"share\":false,\"size\":4096}}"
            )
        };
        let expected = [
            "-object",
            &object("mem", 7, "\"merge\":false,"),
            "-object",
            &object("other", 8, ""),
            "-name",
            "guest=a,,b",
            "-chardev",
            "socket,id=stillframe-monitor,fd=9,server=on,wait=off",
            "-mon",
            "chardev=stillframe-monitor,mode=control",
            "-incoming",
            "defer",
        ];
        assert_eq!(changed, expected);
        let error = change(&words("-m 400"), &how).expect_err("there is none");
        assert!(error.contains("id=mem"), "{error}");
    }

    #[test]
    fn places_are_those_of_servers() {
        let line = "-serial unix:/a,server=on,wait=off -serial unix:/b -chardev \
                    socket,id=c,path=/c,server,nowait -chardev socket,id=d,path=/d -m 400 \
                    -chardev socket,id=e,path=/e,server=off -monitor unix:f,server";
        assert_eq!(listening_at(&words(line)), ["/a", "/c", "f"]);
    }

    #[test]
    fn numbers_and_names_are_filled_in() {
        let line = words("-serial unix:/x/{n}.sock -name {name} {}");
        let filled = fill_in(&line, 3, "clone-3").join(" ");
        assert_eq!(filled, "-serial unix:/x/3.sock -name clone-3 {}");
    }
}
