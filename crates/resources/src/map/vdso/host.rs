//! A host's own vDSO: what a restore has to know of it to put it in another one's place.

use abi::{PAGE_BYTES, Span};

use super::super::listing::{self, Backing};
use super::super::memory::Special;
use super::elf::{Elf, Function};
use crate::{Error, Result};

/// The vDSO that this host's kernel maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// The build id in its ELF notes; empty if it has none.
    pub build_id: Vec<u8>,
    /// Its mappings in the order of their addresses; each begins where the one before ends.
    pub parts: Vec<Part>,
    /// Its functions.
    pub functions: Vec<Function>,
}

/// One mapping of a vDSO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Code or data.
    pub special: Special,
    /// Its size in bytes.
    pub bytes: u64,
}

impl Host {
    /// Looks at the vDSO of this process.
    ///
    /// # Errors
    /// [`Error::Kernel`]; [`Error::Mismatch`] when there is none, or none as kernels make them.
    pub fn probe() -> Result<Self> {
        let own = sys::vdso::own().ok_or_else(|| missing("there is none"))?;
        let text = sys::procfs::read("self/maps");
        let text = text.map_err(|e| Error::kernel("read /proc/self/maps", e))?;
        Self::of(own, &text)
    }

    /// Looks at the vDSO of 32-bit programs; `None` where the kernel has none.
    ///
    /// # Errors
    /// As [`Host::probe`].
    pub fn probe_32() -> Result<Option<Self>> {
        match sys::vdso_32::look() {
            Err(error) if error.kind() == std::io::ErrorKind::Unsupported => Ok(None),
            Err(error) => Err(Error::kernel("look at the vDSO of 32-bit programs", error)),
            Ok(seen) => Self::of(&seen.code, &seen.maps).map(Some),
        }
    }

    /// What a vDSO with this code is like in a process with these mappings.
    fn of(code: &[u8], maps: &[u8]) -> Result<Self> {
        let elf = Elf::new(code).ok_or_else(|| missing("it is of neither 64 nor 32 bits"))?;
        let functions = elf.functions();
        let functions = functions.ok_or_else(|| missing("its symbols make no sense"))?;
        let listed = listing::parse(maps).map_err(|line| missing(&line))?;
        let parts = listed.iter().filter_map(|listed| match listed.backing() {
            Backing::Vdso => Some((listed.span, Special::Vdso)),
            Backing::Vvar => Some((listed.span, Special::Vvar)),
            _ => None,
        });
        let parts = parts.collect::<Vec<_>>();
        let adjoining = |pair: &[(Span, Special)]| pair[0].0.end == pair[1].0.start;
        if !parts.windows(2).all(adjoining) {
            return Err(missing("its mappings are apart"));
        }
        let part = |(span, special): (Span, Special)| Part {
            special,
            bytes: span.bytes(),
        };
        let host = Self {
            build_id: sys::vdso::build_id(code).unwrap_or_default(),
            parts: parts.into_iter().map(part).collect(),
            functions,
        };
        host.is_sound()
            .then_some(host)
            .ok_or_else(|| missing("it has no code or too much"))
    }

    /// Whether it has one mapping of code, and sizes that a vDSO can have.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let codes = self.parts.iter();
        let codes = codes.filter(|part| part.special == Special::Vdso).count();
        let size = |part: &Part| {
            part.bytes > 0
                && part.bytes <= super::BYTES_MAX
                && part.bytes.is_multiple_of(PAGE_BYTES)
                && part.special != Special::No
        };
        let inside = |function: &Function| function.offset < self.code().1;
        codes == 1
            && self.parts.len() <= 16
            && self.parts.iter().all(size)
            && self.functions.iter().all(inside)
    }

    /// The size of all of it in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// Where its code begins, in bytes from the first mapping's start, and its size in bytes.
    #[must_use]
    pub fn code(&self) -> (u64, u64) {
        let is_code = |part: &&Part| part.special == Special::Vdso;
        let before = self.parts.iter().take_while(|part| !is_code(part));
        let bytes = self.parts.iter().find(is_code).map_or(0, |part| part.bytes);
        (before.map(|part| part.bytes).sum(), bytes)
    }

    /// The offset of a function in the code, in bytes.
    #[must_use]
    pub fn function(&self, name: &str) -> Option<u64> {
        let mut all = self.functions.iter();
        all.find(|function| function.name == name)
            .map(|function| function.offset)
    }
}

fn missing(what: &str) -> Error {
    Error::Mismatch {
        what: format!("this kernel's vDSO cannot be used: {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_vdso_is_known() {
        let host = Host::probe().expect("a vDSO");
        let (before, bytes) = host.code();
        assert!(before > 0 && bytes > 0 && before + bytes <= host.bytes());
        assert!(host.function("__vdso_clock_gettime").is_some());
        assert_eq!(Some(host.build_id), sys::vdso::own_build_id());
    }

    #[test]
    fn that_of_32_bit_programs_is_known() {
        let Some(host) = Host::probe_32().expect("looked at") else {
            return;
        };
        let (before, bytes) = host.code();
        assert!(before > 0 && bytes > 0 && before + bytes <= host.bytes());
        for name in ["__kernel_vsyscall", "__vdso_clock_gettime64"] {
            assert!(host.function(name).is_some(), "{name}");
        }
        assert_ne!(Some(host.build_id), sys::vdso::own_build_id());
    }
}
