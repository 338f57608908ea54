//! The extended state of a thread (x87, SSE, AVX, …), brought into the layout of another processor.
//!
//! The kernel gives and takes it in the unpacked form of XSAVE (`PTRACE_GETREGSET`): 512 bytes as
//! of FXSAVE, 64 of header, and behind it each component where this processor keeps it. Both the
//! components and their places differ from processor to processor.
//!
//! - What: registers
//! - Kept: all of the extended state, laid out anew for another processor.
//! - Refused: "thread …: … in use" ("AMX tiles"); "thread …: protection key 0 denied (pkeys(7))",
//!   as "the calls of a dump need memory".
//! - At a restore: what is in use and the processor lacks: "AVX registers", "AVX-512 registers",
//!   "AVX-512 mask registers", "MPX bounds", "memory protection keys", "APX registers", "unknown
//!   registers".
//! - CRIU 4.2: kept for a processor with the same layout; `--cpu-cap` says which differences are
//!   refused. AMX is not known.

use std::ops::Range;

use sys::arch::xsave;

use super::frames;
use crate::{Error, Result};

/// Where the kernel tells which components there are, in bytes that FXSAVE leaves to software.
const FEATURES_AT: usize = 464;
/// The header: which components are not in their initial state.
const HEADER_AT: usize = 512;
/// Where a signal frame tells its components.
const FRAME_FEATURES_AT: usize = FEATURES_AT + 8;
/// The mark behind the area of a signal frame.
const MARK_BYTES: usize = 4;
/// Where components from number 2 on begin.
const COMPONENTS_AT: usize = 576;
/// The SSE control register, and the mask of its bits.
const CONTROL_AT: usize = 24;
const CONTROL_MASK_AT: usize = 28;
/// The protection keys' rights, and what Linux gives every program.
const KEYS: u32 = 9;
const USUAL_KEYS: u32 = 0x5555_5554;
/// The data of matrix tiles, which a program must ask the kernel for.
const TILE_DATA: u32 = 18;

/// Where a processor keeps the components that programs may use.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Layout {
    /// In the order of their numbers, from 2 on.
    #[prost(message, repeated, tag = "1")]
    pub components: Vec<Component>,
}

/// A component of the extended state.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Component {
    /// Its number, from 2 on: bit `number` of XCR0.
    #[prost(uint32, tag = "1")]
    pub number: u32,
    /// Where it stands in the unpacked form.
    #[prost(uint32, tag = "2")]
    pub offset_bytes: u32,
    /// Its size.
    #[prost(uint32, tag = "3")]
    pub size_bytes: u32,
}

impl Component {
    /// Where its bytes stand in an area.
    fn range(&self) -> Range<usize> {
        let at = self.offset_bytes as usize;
        at..at.saturating_add(self.size_bytes as usize)
    }

    /// Its bytes in an area.
    fn of<'a>(&self, area: &'a [u8]) -> Option<&'a [u8]> {
        let range = self.range();
        area.get(range.clone())
            .filter(|_| range.start >= COMPONENTS_AT)
    }

    /// Whether these bytes of it are more than what every program has.
    fn says_something(&self, bytes: &[u8]) -> bool {
        let usual = self.number == KEYS && bytes.starts_with(&USUAL_KEYS.to_le_bytes());
        !usual && bytes.iter().any(|byte| *byte != 0)
    }
}

impl Layout {
    /// That of this processor.
    #[must_use]
    pub fn here() -> Self {
        let component = |number| {
            xsave::place(number).map(|place| Component {
                number,
                offset_bytes: place.offset_bytes,
                size_bytes: place.size_bytes,
            })
        };
        Self {
            components: numbers(xsave::features()).filter_map(component).collect(),
        }
    }

    /// The component of this number.
    fn component(&self, number: u32) -> Option<&Component> {
        self.components.iter().find(|one| one.number == number)
    }

    /// All components, a bit each.
    fn features(&self) -> u64 {
        let bits = self.components.iter().filter(|one| one.number < 63);
        bits.fold(0b11, |all, one| all | 1 << one.number)
    }

    /// The size of an area of a program that has not asked for more.
    fn area_bytes(&self) -> usize {
        let usual = self.components.iter().filter(|one| one.number != TILE_DATA);
        let ends = usual.map(|one| one.range().end);
        ends.max().unwrap_or(0).max(COMPONENTS_AT)
    }

    /// A component that `area` has in use, and its bytes.
    fn used<'a>(&self, number: u32, area: &'a [u8]) -> Result<(&Component, &'a [u8])> {
        let found = self
            .component(number)
            .and_then(|one| Some((one, one.of(area)?)));
        found.ok_or_else(|| corrupt(format!("component {number} has no place")))
    }
}

/// The processor that threads go on with.
#[derive(Clone, Debug)]
pub struct Host {
    /// Where it keeps what.
    pub layout: Layout,
    /// The bits of its SSE control register.
    pub control_bits: u32,
}

impl Host {
    /// This one.
    #[must_use]
    pub fn here() -> Self {
        Self {
            layout: Layout::here(),
            control_bits: xsave::control_bits(),
        }
    }
}

/// The components from number 2 on that an area has in use, a bit each.
#[must_use]
pub fn used_in(area: &[u8]) -> u64 {
    word(area, HEADER_AT).unwrap_or(0) & !0b11
}

/// Which components the kernel had for programs when it gave this area, a bit each.
#[must_use]
pub fn features_of(area: &[u8]) -> u64 {
    word(area, FEATURES_AT).unwrap_or(0)
}

/// Checks at a dump that an area can be given back, and that the thread can make calls for it.
///
/// # Errors
/// [`Error::Unsupported`] for the tile data of thread `tid` of `pid`, and for a protection key that
/// keeps it from memory that has none of the program's own.
pub fn check(pid: i32, tid: i32, area: &[u8]) -> Result<()> {
    if used_in(area) & 1 << TILE_DATA != 0 {
        let what = format!("thread {tid}: {} in use", name(TILE_DATA));
        return Err(Error::unsupported(pid, what));
    }
    let keys = || xsave::keys().map(|keys| keys.offset_bytes as usize);
    if used_in(area) & 1 << KEYS != 0 && keys().is_some_and(|at| denies_key_0(area, at)) {
        let what = format!("thread {tid}: protection key 0 denied (pkeys(7))");
        return Err(Error::unsupported(pid, what).because("the calls of a dump need memory"));
    }
    Ok(())
}

/// True if the rights at `at` deny access or writes by protection key 0.
fn denies_key_0(area: &[u8], at: usize) -> bool {
    area.get(at).is_some_and(|rights| rights & 3 != 0)
}

/// The names of components of a processor that another one does not have, or has of another size.
#[must_use]
pub fn missing_components(from: &Layout, on: &Layout) -> Vec<&'static str> {
    let missing = from.components.iter().filter(|one| {
        let there = on.component(one.number);
        there.is_none_or(|there| there.size_bytes != one.size_bytes)
    });
    let mut names = missing.map(|one| name(one.number)).collect::<Vec<_>>();
    names.dedup();
    names
}

/// What an area needs that `host` does not have, by name.
///
/// # Errors
/// [`Error::Corrupt`] for an area that no kernel has given.
pub fn missing(from: &Layout, area: &[u8], host: &Host) -> Result<Vec<String>> {
    if area.len() < COMPONENTS_AT {
        return Err(corrupt(format!("{} bytes are too few", area.len())));
    }
    let mut missing = Vec::new();
    for number in numbers(used_in(area)) {
        let (component, bytes) = from.used(number, area)?;
        let there = host.layout.component(number);
        let fits = there.is_some_and(|one| one.size_bytes == component.size_bytes);
        if !fits && component.says_something(bytes) {
            missing.push(name(number).to_owned());
        }
    }
    let control = half(area, CONTROL_AT) & !host.control_bits;
    if control != 0 {
        missing.push(format!("bits {control:#x} of the SSE control register"));
    }
    Ok(missing)
}

/// An area of the dump in the layout of `fresh`, which the kernel gave of a new thread here.
///
/// # Errors
/// [`Error::Corrupt`] for an area that no kernel has given.
pub fn rebuild(from: &Layout, area: &[u8], host: &Layout, fresh: &[u8]) -> Result<Vec<u8>> {
    if area.len() < COMPONENTS_AT || fresh.len() < COMPONENTS_AT {
        return Err(corrupt("it is cut short".to_owned()));
    }
    let mut built = fresh.to_vec();
    built[..FEATURES_AT].copy_from_slice(&area[..FEATURES_AT]);
    let mask = CONTROL_MASK_AT..CONTROL_MASK_AT + 4;
    built[mask.clone()].copy_from_slice(&fresh[mask]);
    // The rights of a new program, where the other processor had none; 0 would be others.
    let kept = used_in(fresh) & !features_of(area) & 1 << KEYS;
    let used = word(area, HEADER_AT).unwrap_or(0) & 0b11 | kept;
    let moved = move_components(from, area, host, &mut built)?;
    set_header(&mut built, used | moved);
    Ok(built)
}

/// Copies all components that `area` uses to where `host` has them in `to`, as far as they fit.
/// Returns them, a bit each.
fn move_components(from: &Layout, area: &[u8], host: &Layout, to: &mut [u8]) -> Result<u64> {
    let mut moved = 0;
    for number in numbers(used_in(area)) {
        let (_, bytes) = from.used(number, area)?;
        let place = host.component(number).map(Component::range);
        let place = place.and_then(|place| to.get_mut(place));
        if let Some(place) = place.filter(|place| place.len() == bytes.len()) {
            place.copy_from_slice(bytes);
            moved |= 1 << number;
        }
    }
    Ok(moved)
}

fn set_header(area: &mut [u8], used: u64) {
    area[HEADER_AT..COMPONENTS_AT].fill(0);
    area[HEADER_AT..HEADER_AT + 8].copy_from_slice(&used.to_le_bytes());
}

/// What a signal frame is brought back as: its area, or what does not go into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reframed {
    /// The area as `host` takes it, as long as it was.
    As(Vec<u8>),
    /// The names of what `host` does not have, or has where the frame ends before.
    Lacks(Vec<String>),
}

/// A signal frame's area, with the mark behind it, as `host` takes it at the end of the handler:
/// the frame's size stays, but the kernel takes what is longer than its own for an area without
/// components.
///
/// # Errors
/// [`Error::Corrupt`] for an area that no kernel has made.
pub fn reframe(from: &Layout, area: &[u8], host: &Host) -> Result<Reframed> {
    let mut lacks = missing(from, area, host)?;
    let room = area.len().saturating_sub(MARK_BYTES).max(COMPONENTS_AT);
    let mut built = area.to_vec();
    built[COMPONENTS_AT..].fill(0);
    let moved = move_components(from, area, &host.layout, &mut built[..room])?;
    for number in numbers(used_in(area) & !moved) {
        let (component, bytes) = from.used(number, area)?;
        if component.says_something(bytes) && host.layout.component(number).is_some() {
            lacks.push(name(number).to_owned());
        }
    }
    if !lacks.is_empty() {
        return Ok(Reframed::Lacks(lacks));
    }
    set_header(
        &mut built,
        word(area, HEADER_AT).unwrap_or(0) & 0b11 | moved,
    );
    let ends_inside = |one: &&Component| one.range().end <= room;
    let fitting = host.layout.components.iter().filter(ends_inside).copied();
    let components = fitting.collect();
    let features = Layout { components }.features();
    let frame = frames::Software {
        features: word(area, FRAME_FEATURES_AT).unwrap_or(0) & features,
        size_bytes: room.min(host.layout.area_bytes()),
    };
    frame.write(&mut built);
    Ok(Reframed::As(built))
}

/// What a component is called.
#[must_use]
pub fn name(number: u32) -> &'static str {
    match number {
        2 => "AVX registers",
        3 | 4 => "MPX bounds",
        5 => "AVX-512 mask registers",
        6 | 7 => "AVX-512 registers",
        KEYS => "memory protection keys",
        17 | TILE_DATA => "AMX tiles",
        19 => "APX registers",
        _ => "unknown registers",
    }
}

fn numbers(components: u64) -> impl Iterator<Item = u32> {
    (2..63).filter(move |number| components & 1 << number != 0)
}

fn word(area: &[u8], at: usize) -> Option<u64> {
    let bytes = area.get(at..at + 8)?;
    Some(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
}

fn half(area: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(area[at..at + 4].try_into().expect("4 bytes"))
}

fn corrupt(what: String) -> Error {
    Error::corrupt("extended state", what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_without_key_0_deny_it() {
        let area = |rights: u8| [vec![0; 2432], vec![rights, 0x55, 0x55, 0x55]].concat();
        assert!(!denies_key_0(&area(0x54), 2432));
        assert!(denies_key_0(&area(0x55), 2432));
        assert!(denies_key_0(&area(0x56), 2432));
        assert!(!denies_key_0(&[], 2432));
    }

    /// As processors of two makers have them: without MPX, what is behind moves up.
    const TIGHT: [Component; 4] = [
        component(2, 576, 256),
        component(5, 832, 64),
        component(6, 896, 512),
        component(KEYS, 2432, 8),
    ];

    const fn component(number: u32, offset_bytes: u32, size_bytes: u32) -> Component {
        Component {
            number,
            offset_bytes,
            size_bytes,
        }
    }

    /// The wide layout, of a processor without AVX-512.
    fn host() -> Host {
        let components = vec![component(2, 576, 256), component(KEYS, 2688, 8)];
        Host {
            layout: Layout { components },
            control_bits: 0xffff,
        }
    }

    fn layout() -> Layout {
        let components = TIGHT.to_vec();
        Layout { components }
    }

    /// An area of 2440 bytes with these components in use, each filled with its number.
    fn area(used: &[u32]) -> Vec<u8> {
        let mut area = vec![0; 2440];
        area[..FEATURES_AT].fill(0xaa);
        area[CONTROL_AT..CONTROL_AT + 4].copy_from_slice(&0x1f80_u32.to_le_bytes());
        area[FEATURES_AT..FEATURES_AT + 8].copy_from_slice(&0x2e7_u64.to_le_bytes());
        let bits = used
            .iter()
            .fold(0b11_u64, |bits, number| bits | 1 << number);
        area[HEADER_AT..HEADER_AT + 8].copy_from_slice(&bits.to_le_bytes());
        for one in TIGHT.iter().filter(|one| used.contains(&one.number)) {
            let at = one.offset_bytes as usize;
            area[at..at + one.size_bytes as usize].fill(one.number as u8);
        }
        area
    }

    #[test]
    fn components_move_to_where_the_host_keeps_them() {
        let fresh = {
            let mut fresh = vec![0; 2696];
            fresh[CONTROL_MASK_AT..CONTROL_MASK_AT + 4].copy_from_slice(&[7; 4]);
            fresh[FEATURES_AT..FEATURES_AT + 8].copy_from_slice(&0x207_u64.to_le_bytes());
            fresh
        };
        let built = rebuild(&layout(), &area(&[2, KEYS]), &host().layout, &fresh).expect("sound");
        assert_eq!(built.len(), 2696);
        assert_eq!(built[..CONTROL_MASK_AT], area(&[])[..CONTROL_MASK_AT]);
        assert_eq!(built[CONTROL_MASK_AT..32], [7; 4]);
        assert_eq!(features_of(&built), 0x207);
        assert_eq!(word(&built, HEADER_AT), Some(0x207));
        assert_eq!((built[576], built[831], built[832]), (2, 2, 0));
        assert_eq!((built[2432], built[2688], built[2695]), (0, 9, 9));
    }

    #[test]
    fn what_only_the_host_has_is_as_in_a_new_program() {
        let mut fresh = vec![0; 2696];
        // With registers in use that are the restorer's.
        fresh[HEADER_AT..HEADER_AT + 8].copy_from_slice(&0x2e7_u64.to_le_bytes());
        fresh[2688..2692].copy_from_slice(&USUAL_KEYS.to_le_bytes());
        let mut old = area(&[2]);
        old[FEATURES_AT..FEATURES_AT + 8].copy_from_slice(&0b111_u64.to_le_bytes());
        old.truncate(832);
        let built = rebuild(&layout(), &old, &host().layout, &fresh).expect("sound");
        assert_eq!(word(&built, HEADER_AT), Some(0x207));
        assert_eq!(built[2688..2692], USUAL_KEYS.to_le_bytes());
    }

    #[test]
    fn what_is_in_use_and_missing_is_named() {
        let missing = |area: &[u8]| missing(&layout(), area, &host()).expect("sound");
        assert!(missing(&area(&[2, KEYS])).is_empty());
        let named = ["AVX-512 mask registers", "AVX-512 registers"];
        assert_eq!(missing(&area(&[2, 5, 6])), named);
        // Marked as used, but as at the beginning.
        let mut cleared = area(&[2, 5]);
        cleared[832..896].fill(0);
        assert!(missing(&cleared).is_empty());
        let mut control = area(&[]);
        control[CONTROL_AT + 2] = 2;
        assert_eq!(
            missing(&control),
            ["bits 0x20000 of the SSE control register"]
        );
        // A host without keys does as well, unless they forbid something of their own.
        let bare = Host {
            layout: Layout::default(),
            ..host()
        };
        let mut keys = area(&[KEYS]);
        keys[2432..2440].copy_from_slice(&u64::from(USUAL_KEYS).to_le_bytes());
        let told = |area: &[u8]| super::missing(&layout(), area, &bare).expect("sound");
        assert!(told(&keys).is_empty());
        keys[2433] = 0;
        assert_eq!(told(&keys), ["memory protection keys"]);
    }

    #[test]
    fn areas_that_no_kernel_gave_are_corrupt() {
        let broken = |area: &[u8]| missing(&layout(), area, &host()).expect_err("damaged");
        broken(&[0; 100]);
        broken(&area(&[2])[..600]);
        let mut unknown = area(&[]);
        unknown[HEADER_AT + 7] = 1;
        broken(&unknown);
        let before_the_header = Layout {
            components: vec![component(2, 0, 256)],
        };
        missing(&before_the_header, &area(&[2]), &host()).expect_err("damaged");
        let rebuilt = rebuild(&before_the_header, &area(&[2]), &layout(), &area(&[]));
        rebuilt.expect_err("damaged");
    }

    /// The area of a signal frame with these components in use, and its mark.
    fn framed(used: &[u32]) -> Vec<u8> {
        let mut framed = area(used);
        framed.extend([0; MARK_BYTES]);
        frames::Software {
            features: 0x2e7,
            size_bytes: 2440,
        }
        .write(&mut framed);
        framed
    }

    #[test]
    fn a_signal_frame_is_made_the_hosts() {
        let Reframed::As(built) = reframe(&layout(), &framed(&[2]), &host()).expect("sound") else {
            panic!("all of it fits");
        };
        assert_eq!(built.len(), 2444);
        // Keys stand behind its end, and are those of a new program.
        let software = frames::Software::read(&built).expect("a frame");
        assert_eq!((software.features, software.size_bytes), (0b111, 2440));
        assert_eq!(word(&built, HEADER_AT), Some(0b111));
        assert_eq!((built[576], built[831], built[832]), (2, 2, 0));
        assert_eq!(built[..FEATURES_AT], area(&[])[..FEATURES_AT]);
        // A smaller processor: the kernel wants no more than its own size.
        let small = Host {
            layout: Layout {
                components: vec![component(2, 576, 256)],
            },
            ..host()
        };
        let Reframed::As(built) = reframe(&layout(), &framed(&[2]), &small).expect("sound") else {
            panic!("all of it fits");
        };
        let software = frames::Software::read(&built).expect("a frame");
        assert_eq!((software.features, software.size_bytes), (0b111, 832));
    }

    #[test]
    fn a_signal_frame_that_does_not_fit_is_told() {
        let lacks = |used: &[u32]| reframe(&layout(), &framed(used), &host()).expect("sound");
        let names =
            |names: &[&str]| Reframed::Lacks(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(lacks(&[6]), names(&["AVX-512 registers"]));
        assert_eq!(lacks(&[KEYS]), names(&["memory protection keys"]));
    }

    #[test]
    fn this_processors_layout_is_its_own() {
        let layout = Layout::here();
        assert_eq!(layout.features(), xsave::features() & !(1 << 63) | 0b11);
        assert_eq!(layout, Host::here().layout);
    }
}
