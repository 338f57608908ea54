//! The boot of this host: random(4), `/proc/sys/kernel/random/boot_id`.

use std::sync::OnceLock;

/// The id of this boot, a UUID in text; none where /proc does not have it. A process reads it once.
#[must_use]
pub fn id() -> Option<&'static str> {
    static ID: OnceLock<Option<String>> = OnceLock::new();
    let id = ID.get_or_init(|| {
        let text = crate::procfs::read("sys/kernel/random/boot_id").ok()?;
        Some(String::from_utf8(text).ok()?.trim().to_owned())
    });
    id.as_deref()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_id_is_that_of_the_kernel() {
        let told = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        assert_eq!(super::id(), told.ok().as_deref().map(str::trim));
    }
}
