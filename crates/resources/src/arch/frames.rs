//! Signal frames on a thread's stacks: what a handler that runs interrupted, and what the kernel
//! gives back when it returns (sigreturn(2)).
//!
//! The extended state in a frame is laid out as the processor has it, like that of the thread
//! ([`super::xstate`]). The kernel marks it: with a magic number, the size and the components in
//! the bytes that FXSAVE leaves to software, and another magic number behind it.

const MAGIC: u32 = 0x4650_5853;
const END_MAGIC: u32 = 0x4650_5845;
/// Where in an area the kernel's marks stand.
const MAGIC_AT: usize = 464;
const WHOLE_SIZE_AT: usize = 468;
const FEATURES_AT: usize = 472;
const SIZE_AT: usize = 480;
/// An area has a multiple of this as address, and at least these bytes.
const ALIGN_BYTES: usize = 64;
const LEAST_BYTES: usize = 576;
/// More than any processor has.
const MOST_BYTES: usize = 64 << 10;
/// `struct rt_sigframe`: its size; where it has the interrupted stack pointer, the code segment
/// and the address of the area, which stands above it.
const FRAME_BYTES: usize = 440;
const STACK_AT: usize = 168;
const CODE_AT: usize = 192;
const AREA_AT: usize = 232;
const CODE_64: u16 = 0x33;

/// What the kernel has marked an area with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Software {
    /// The components that it may have, a bit each.
    pub features: u64,
    /// Its size, without the mark behind it.
    pub size_bytes: usize,
}

impl Software {
    /// Reads the marks of the area at the beginning of `bytes`; `None` where there is no area.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Option<Self> {
        if half(bytes, MAGIC_AT)? != MAGIC {
            return None;
        }
        let size_bytes = half(bytes, SIZE_AT)? as usize;
        let sound = (LEAST_BYTES..MOST_BYTES).contains(&size_bytes);
        let ends = sound && half(bytes, size_bytes)? == END_MAGIC;
        ends.then_some(Self {
            features: word(bytes, FEATURES_AT)?,
            size_bytes,
        })
    }

    /// Writes the marks. What the kernel has reserved stays.
    pub(super) fn write(self, area: &mut [u8]) {
        let size = u32::try_from(self.size_bytes).expect("below 64 KiB");
        let whole = half(area, WHOLE_SIZE_AT).unwrap_or(0).max(size + 4);
        let mut put = |at: usize, bytes: &[u8]| area[at..at + bytes.len()].copy_from_slice(bytes);
        put(MAGIC_AT, &MAGIC.to_le_bytes());
        put(WHOLE_SIZE_AT, &whole.to_le_bytes());
        put(FEATURES_AT, &self.features.to_le_bytes());
        put(SIZE_AT, &size.to_le_bytes());
        put(self.size_bytes, &END_MAGIC.to_le_bytes());
    }
}

/// A signal frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Where its area stands in the bytes that were searched.
    pub area_at: usize,
    /// The size of the area, with the mark behind it.
    pub area_bytes: usize,
    /// The stack pointer that it interrupted, maybe on another stack.
    pub interrupted: u64,
}

/// Finds the frames in the part of a stack from `start` on, a whole page, the innermost first.
#[must_use]
pub fn find(stack: &[u8], start: u64) -> Vec<Frame> {
    let areas = (0..stack.len()).step_by(ALIGN_BYTES);
    let frame = |at: usize| {
        let software = Software::read(&stack[at..])?;
        let below = at.checked_sub(FRAME_BYTES)?;
        // It is aligned to 16 bytes, less 8.
        let frame = (below.saturating_sub(ALIGN_BYTES)..=below)
            .rev()
            .find(|frame| {
                let area = word(stack, frame + AREA_AT);
                let code = word(stack, frame + CODE_AT).map(|word| word as u16);
                frame % 16 == 8 && area == Some(start + at as u64) && code == Some(CODE_64)
            })?;
        Some(Frame {
            area_at: at,
            area_bytes: software.size_bytes + size_of::<u32>(),
            interrupted: word(stack, frame + STACK_AT)?,
        })
    };
    areas.filter_map(frame).collect()
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().expect("4 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 0x7000_0000_0000;
    const AT: usize = 0x800;
    const AREA_BYTES: usize = 832;

    /// A page with a frame whose area is at `AT`.
    fn stack() -> Vec<u8> {
        let mut stack = vec![0; 4096];
        let software = Software {
            features: 7,
            size_bytes: AREA_BYTES,
        };
        software.write(&mut stack[AT..]);
        let frame = (AT - FRAME_BYTES) / 16 * 16 - 8;
        let mut put = |at: usize, word: u64| {
            stack[frame + at..frame + at + 8].copy_from_slice(&word.to_le_bytes());
        };
        put(AREA_AT, START + AT as u64);
        put(CODE_AT, 0x002b_0000_0000_0033);
        put(STACK_AT, 0x1234);
        stack
    }

    #[test]
    fn a_frame_is_found() {
        let frame = Frame {
            area_at: AT,
            area_bytes: AREA_BYTES + 4,
            interrupted: 0x1234,
        };
        assert_eq!(find(&stack(), START), [frame]);
        let software = Software::read(&stack()[AT..]).expect("marked");
        assert_eq!((software.features, software.size_bytes), (7, AREA_BYTES));
    }

    #[test]
    fn what_only_looks_like_one_is_none() {
        // Elsewhere; without its end; cut short; of another size than any.
        assert_eq!(find(&stack(), START + 4096), []);
        let mut ended = stack();
        ended[AT + AREA_BYTES] = 0;
        assert_eq!(find(&ended, START), []);
        assert_eq!(find(&stack()[..AT + AREA_BYTES], START), []);
        let mut endless = stack();
        endless[AT + SIZE_AT..AT + SIZE_AT + 4].fill(0xff);
        assert_eq!(find(&endless, START), []);
        assert_eq!(find(&stack()[AT..], START + AT as u64), []);
    }
}
