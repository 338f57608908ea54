//! An interface's settings in /proc/sys/net/ipv4/conf and /proc/sys/net/ipv6/conf.

use std::fs;
use std::path::PathBuf;

/// How IPv6 makes an address of its own: it is set at last, as one is made at once.
const LAST: &str = "addr_gen_mode";
/// The value of that by which none is made (`IN6_ADDR_GEN_MODE_NONE`).
const NO_ADDRESS: &str = "1";
/// What follows from other things.
const LEFT_OUT: [&str; 1] = ["mtu"];
/// Longer values than any.
const VALUE_MAX_BYTES: usize = 256;

/// One setting.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// Whether it is one of IPv6, not of IPv4.
    #[prost(bool, tag = "1")]
    pub is_six: bool,
    /// Its name: "rp_filter".
    #[prost(string, tag = "2")]
    pub name: String,
    /// Its value, as it is read.
    #[prost(string, tag = "3")]
    pub value: String,
}

impl Value {
    /// Whether it is one that a dump could have written: a plain name below the interface's.
    pub(super) fn is_sound(&self) -> bool {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let name = !self.name.is_empty() && self.name.chars().all(plain);
        name && self.value.len() <= VALUE_MAX_BYTES
    }
}

fn folder(interface: &str, is_six: bool) -> PathBuf {
    let family = if is_six { "ipv6" } else { "ipv4" };
    PathBuf::from(sys::procfs::path(format_args!(
        "sys/net/{family}/conf/{interface}"
    )))
}

/// All settings of an interface; those that cannot be read have no value.
pub(super) fn read(interface: &str) -> Vec<Value> {
    let mut all = Vec::new();
    for is_six in [false, true] {
        let entries = fs::read_dir(folder(interface, is_six));
        for entry in entries.into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Ok(value) = fs::read_to_string(entry.path()) else {
                continue;
            };
            let value = Value {
                is_six,
                name,
                value: value.trim_end().to_owned(),
            };
            if value.is_sound() && !LEFT_OUT.contains(&value.name.as_str()) {
                all.push(value);
            }
        }
    }
    // In an order that does not change.
    all.sort_by(|one, other| (one.is_six, &one.name).cmp(&(other.is_six, &other.name)));
    all
}

/// Gives a new interface its settings, but for the one by which it makes addresses: none for now.
pub(super) fn apply(interface: &str, values: &[Value]) {
    for value in values.iter().filter(|value| value.name != LAST) {
        set(interface, value);
    }
    let none = |value: &&Value| value.name == LAST;
    for value in values.iter().filter(none) {
        let none = Value {
            value: NO_ADDRESS.to_owned(),
            ..value.clone()
        };
        set(interface, &none);
    }
}

/// Gives it the one that was left out.
pub(super) fn apply_last(interface: &str, values: &[Value]) {
    for value in values.iter().filter(|value| value.name == LAST) {
        set(interface, value);
    }
}

/// Sets one that differs; another kernel may not have it, or not take its value.
fn set(interface: &str, value: &Value) {
    let path = folder(interface, value.is_six).join(&value.name);
    let present = fs::read_to_string(&path).unwrap_or_default();
    if present.trim_end() == value.value {
        return;
    }
    if let Err(error) = fs::write(&path, &value.value) {
        log::warn!("{}: it stays as it is: {error}", path.display());
    }
}
