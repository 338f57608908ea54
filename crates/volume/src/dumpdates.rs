//! Levels: what dump(8) means by them, and the file in which it notes its dumps.
//!
//! A dump of a level has what has changed since the last one of a lower level that was noted. The
//! file says of when that was; the image of that time is looked for beside the new one.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use store::Images;
use sys::new_file::NewFile;

use crate::device::Volume;
use crate::ext4::Time;
use crate::place::OpenImage;
use crate::{Error, FILE_MODE, Result};

const MONTHS: [&str; 12] = [
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
];
const WEEKDAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
const DAY_S: i64 = 86_400;

/// A volume's level, and where dumps of levels are noted.
#[derive(Clone, Debug)]
pub struct Level {
    /// The level.
    pub level: u32,
    /// The file.
    pub dumpdates: PathBuf,
}

/// A line of it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct DumpDate {
    device: String,
    level: u32,
    date_s: i64,
}

impl Level {
    /// Finds the image that one of this level of a volume in `images` is over: none where nothing
    /// is noted of a lower level.
    ///
    /// # Errors
    /// [`Error::Unfit`] where there is no image beside it of what is noted last, or the file
    /// cannot be true; [`Error::File`].
    pub fn parent(&self, volume: &Path, images: &Images) -> Result<Option<Images>> {
        let device = device_of(volume)?;
        let text = match std::fs::read_to_string(&self.dumpdates) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.map_err(Error::file("read", &self.dumpdates))?,
        };
        let mut last: Option<DumpDate> = None;
        for line in text.lines() {
            let Some(note) = DumpDate::of(line, &device) else {
                continue;
            };
            let note = note.map_err(|what| self.unfit(&format!("{line:?}: {what}")))?;
            let is_later = last.as_ref().is_none_or(|last| last.date_s < note.date_s);
            if note.level < self.level && is_later {
                last = Some(note);
            }
        }
        let Some(last) = last else {
            return Ok(None);
        };
        let found = beside(images, last.date_s, uuid_of(volume)?)?;
        let found = found.ok_or_else(|| {
            self.unfit(&format!(
                "the last dump of {device} of a lower level than {} was one of level {} on {}, of \
                 which there is no image beside {images}",
                self.level,
                last.level,
                date(last.date_s)
            ))
        });
        found.map(Some)
    }

    /// Notes that a dump of this level was made of what a volume was at an instant.
    ///
    /// # Errors
    /// [`Error::File`]; the file is as it was then.
    pub fn note(&self, volume: &Path, instant: Time) -> Result<()> {
        let path = &self.dumpdates;
        let device = device_of(volume)?;
        let _lock = lock(path)?;
        let mut text = String::new();
        let read = File::open(path).and_then(|mut file| file.read_to_string(&mut text));
        read.map_err(Error::file("read", path))?;
        let is_replaced = |line: &&str| {
            let note = DumpDate::of(line, &device);
            note.is_some_and(|note| note.is_ok_and(|note| note.level == self.level))
        };
        let mut lines = text.lines().filter(|line| !is_replaced(line));
        let mut new = lines
            .by_ref()
            .map(|line| format!("{line}\n"))
            .collect::<String>();
        new += &format!("{device} {} {} +0000\n", self.level, date(instant.s));
        let file = NewFile::beside(path, FILE_MODE);
        let mut file = file.map_err(Error::file("make a file for", path))?;
        let facts = std::fs::metadata(path).map_err(Error::file("look at", path))?;
        let written = file.file.write_all(new.as_bytes());
        let written = written.and_then(|()| file.file.set_permissions(facts.permissions()));
        let written = written.and_then(|()| file.file.sync_all());
        written.map_err(Error::file("write", path))?;
        file.publish().map_err(Error::file("make", path))
    }

    fn unfit(&self, what: &str) -> Error {
        Error::Unfit(format!("{}: {what}", self.dumpdates.display()))
    }
}

/// Keeps other writers off the file, which is made where it is missing.
fn lock(path: &Path) -> Result<File> {
    use std::os::unix::fs::MetadataExt;
    loop {
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(true);
        let file = options.open(path).map_err(Error::file("open", path))?;
        flock(&file, FlockOperation::LockExclusive).map_err(Error::file("lock", path))?;
        // Who had it may have replaced it.
        let own = file.metadata().map_err(Error::file("look at", path))?;
        match std::fs::metadata(path) {
            Ok(facts) if (facts.dev(), facts.ino()) == (own.dev(), own.ino()) => return Ok(file),
            _ => {}
        }
    }
}

/// Returns the name of a volume there: its device, or the file.
fn device_of(volume: &Path) -> Result<String> {
    let path = Volume::open(volume)?.path;
    let path = path.canonicalize().map_err(Error::file("look at", &path))?;
    let name = path
        .to_str()
        .filter(|name| !name.contains(char::is_whitespace));
    let name = name.map(str::to_owned);
    name.ok_or_else(|| {
        let name = path.display();
        Error::Unfit(format!(
            "{name} cannot be noted among dumps: it has spaces, or is no text"
        ))
    })
}

/// The identity of the file system on a volume.
fn uuid_of(volume: &Path) -> Result<[u8; 16]> {
    let volume = Volume::open(volume)?;
    Ok(crate::dump::open(&volume)?.superblock().uuid)
}

/// The image in a directory beside `images` that is of this second and of the volume with this
/// identity: others may have been made in the same second.
fn beside(images: &Images, date_s: i64, uuid: [u8; 16]) -> Result<Option<Images>> {
    let folder = images.directory().and_then(Path::parent);
    let Some(folder) = folder else {
        return Ok(None);
    };
    let folder = match folder == Path::new("") {
        true => Path::new("."),
        false => folder,
    };
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(Error::file("read", folder))?,
    };
    for entry in entries {
        let path = entry.map_err(Error::file("read", folder))?.path();
        if !path.is_dir() || images.directory().is_some_and(|own| own == path) {
            continue;
        }
        let images = Images::from(path);
        // Others may be there as well.
        let opened = OpenImage::open(&images);
        if opened.is_ok_and(|one| (one.state.instant.s, one.state.uuid) == (date_s, uuid)) {
            return Ok(Some(images));
        }
    }
    Ok(None)
}

impl DumpDate {
    /// Reads a line, if it is about this device.
    fn of(line: &str, device: &str) -> Option<Result<Self, &'static str>> {
        let mut words = line.split_ascii_whitespace();
        if words.next()? != device {
            return None;
        }
        let rest = words.collect::<Vec<_>>();
        let read = || {
            let [level, _, month, day, time, year, zone] = rest[..] else {
                return Err("it has not a level and a date with a time zone");
            };
            let level = level.parse().map_err(|_| "it has no level")?;
            let date_s = seconds(month, day, time, year).ok_or("it has no date")?;
            let zone_s = offset(zone).ok_or("it has no time zone")?;
            Ok(Self {
                device: device.to_owned(),
                level,
                date_s: date_s - zone_s,
            })
        };
        Some(read())
    }
}

/// A date as ctime(3) writes it, of UTC.
fn date(s: i64) -> String {
    let (days, of_day) = (s.div_euclid(DAY_S), s.rem_euclid(DAY_S));
    // Years from March on, so that a leap day is the last one of a year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = (month + 2) % 12;
    let year = year_of_era + era * 400 + i64::from(month < 2);
    format!(
        "{} {} {day:2} {:02}:{:02}:{:02} {year}",
        WEEKDAYS[days.rem_euclid(7) as usize],
        MONTHS[month as usize],
        of_day / 3600,
        of_day / 60 % 60,
        of_day % 60
    )
}

/// The seconds since 1970 of a date.
fn seconds(month: &str, day: &str, time: &str, year: &str) -> Option<i64> {
    let month = MONTHS.iter().position(|name| *name == month)? as i64;
    let (day, year) = (day.parse::<i64>().ok()?, year.parse::<i64>().ok()?);
    let mut parts = time.split(':').map(|part| part.parse::<i64>().ok());
    let (hours, minutes, s) = (parts.next()??, parts.next()??, parts.next()??);
    if !(1..=31).contains(&day) || !(1970..10_000).contains(&year) || parts.next().is_some() {
        return None;
    }
    let (month, year) = ((month + 10) % 12, year - i64::from(month < 2));
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    let days = year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468;
    Some(days * DAY_S + hours * 3600 + minutes * 60 + s)
}

/// How many seconds a time zone such as `+0130` is before UTC.
fn offset(zone: &str) -> Option<i64> {
    let (sign, digits) = match zone.as_bytes().first()? {
        b'+' => (1, &zone[1..]),
        b'-' => (-1, &zone[1..]),
        _ => return None,
    };
    let is_number = digits.len() == 4 && digits.bytes().all(|digit| digit.is_ascii_digit());
    let number = Some(digits).filter(|_| is_number)?;
    let number = number.parse::<i64>().ok()?;
    Some(sign * (number / 100 * 3600 + number % 100 * 60))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_ctime() {
        for (s, text) in [
            (0, "Thu Jan  1 00:00:00 1970"),
            (1_795_466_051, "Mon Nov 23 20:34:11 2026"),
            (951_782_399, "Mon Feb 28 23:59:59 2000"),
            (951_782_400, "Tue Feb 29 00:00:00 2000"),
            (4_107_542_400, "Mon Mar  1 00:00:00 2100"),
        ] {
            assert_eq!(date(s), text);
            let words = text.split_ascii_whitespace().collect::<Vec<_>>();
            assert_eq!(
                seconds(words[1], words[2], words[3], words[4]),
                Some(s),
                "{text}"
            );
        }
        for day in (0..40_000).map(|day| day * DAY_S + 3661) {
            let text = date(day);
            let words = text.split_ascii_whitespace().collect::<Vec<_>>();
            assert_eq!(
                seconds(words[1], words[2], words[3], words[4]),
                Some(day),
                "{text}"
            );
        }
    }

    #[test]
    fn notes_are_those_of_dump() {
        let line = "/dev/loop0 1 Mon Nov 23 20:34:12 2026 +0100";
        let note = DumpDate::of(line, "/dev/loop0").unwrap().unwrap();
        assert_eq!((note.level, note.date_s), (1, 1_795_466_052 - 3600));
        assert_eq!(DumpDate::of(line, "/dev/loop1"), None);
        assert_eq!(DumpDate::of("", "/dev/loop0"), None);
        for wrong in [
            "/dev/loop0",
            "/dev/loop0 1",
            "/dev/loop0 x Mon Nov 23 20:34:12 2026 +0100",
            "/dev/loop0 1 Mon Nov 23 20:34:12 2026",
            "/dev/loop0 1 Mon Nov 32 20:34:12 2026 +0100",
            "/dev/loop0 1 Mon Nov 23 20:34 2026 +0100",
            "/dev/loop0 1 Mon Nov 23 20:34:12 2026 UTC",
            "/dev/loop0 1 Mon Nov 23 20:34:12 2026 +\u{e9}00",
            "/dev/loop0 1 Mon Nov 23 20:34:12 2026 +-100",
        ] {
            assert!(
                DumpDate::of(wrong, "/dev/loop0").unwrap().is_err(),
                "{wrong}"
            );
        }
    }
}
