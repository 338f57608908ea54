//! What /proc/PID/fdinfo/FD says about a descriptor and its description.

use rustix::fs::OFlags;

/// What /proc/PID/fdinfo/FD says (proc_pid_fdinfo(5)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// The file offset in bytes.
    pub pos: u64,
    /// Access mode and status flags, without `O_CLOEXEC`.
    pub flags: u32,
    /// The mount, as numbered in /proc/PID/mountinfo.
    pub mnt_id: u32,
    /// The lines after those, by kind of file.
    pub rest: String,
}

impl Info {
    /// Reads the text of an fdinfo file; also tells whether the descriptor is close-on-exec.
    /// `None` when it is not what the kernel writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<(Self, bool)> {
        let mut info = Self::default();
        let (mut has_flags, mut cloexec) = (false, false);
        for line in text.lines() {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.trim();
            match name {
                // Offsets are signed: /dev/mem may be read in its upper half.
                "pos" => info.pos = value.parse::<i64>().ok()?.cast_unsigned(),
                "flags" if !has_flags => {
                    let flags = OFlags::from_bits_retain(u32::from_str_radix(value, 8).ok()?);
                    cloexec = flags.contains(OFlags::CLOEXEC);
                    info.flags = flags.difference(OFlags::CLOEXEC).bits();
                    has_flags = true;
                }
                "mnt_id" => info.mnt_id = value.parse().ok()?,
                "ino" => {}
                _ => {
                    info.rest.push_str(line);
                    info.rest.push('\n');
                }
            }
        }
        has_flags.then_some((info, cloexec))
    }

    /// The value of the first line "name: value" of the rest.
    #[must_use]
    pub fn field<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.lines(name).next()
    }

    /// The values of all lines "name: value" of the rest.
    pub fn lines<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.rest.lines().filter_map(move |line| {
            let value = line.strip_prefix(name)?.strip_prefix(':')?;
            Some(value.trim())
        })
    }

    /// The status flags as a set.
    #[must_use]
    pub fn oflags(&self) -> OFlags {
        OFlags::from_bits_retain(self.flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_writes() {
        let text = "pos:\t12\nflags:\t02000002\nmnt_id:\t17\nino:\t1038\nclockid: 1\nticks: 3\n\
                    settime flags: 01\n";
        let (info, cloexec) = Info::parse(text).expect("well formed");
        assert!(cloexec);
        assert_eq!((info.pos, info.flags, info.mnt_id), (12, 2, 17));
        assert_eq!(info.field("ticks"), Some("3"));
        assert_eq!(info.field("settime flags"), Some("01"));
        assert_eq!(info.field("tick"), None);
    }

    #[test]
    fn refuses_other_text() {
        assert_eq!(Info::parse("pos:\t0\n"), None);
        assert_eq!(Info::parse("pos:\tx\nflags:\t0\n"), None);
        assert_eq!(Info::parse("flags:\t08\n"), None);
    }
}
