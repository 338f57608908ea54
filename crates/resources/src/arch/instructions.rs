//! The sets of instructions that this processor and its kernel have for programs (Intel's manual,
//! volume 2, CPUID), by the names that Rust's standard library has for them.

use std::collections::BTreeSet;

/// Which sets of instructions there are.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Instructions {
    /// Their names.
    #[prost(string, repeated, tag = "1")]
    pub names: Vec<String>,
}

macro_rules! there_are {
    ($($name:tt)*) => {{
        let mut names = Vec::new();
        $(if std::arch::is_x86_feature_detected!($name) {
            names.push($name.to_owned());
        })*
        names
    }};
}

impl Instructions {
    /// Those of this processor.
    #[must_use]
    pub fn here() -> Self {
        Self {
            names: there_are!(
                "sse" "sse2" "sse3" "ssse3" "sse4.1" "sse4.2" "sse4a" "avx" "avx2" "fma" "f16c"
                "avx512f" "avx512cd" "avx512bw" "avx512dq" "avx512vl" "avx512ifma" "avx512vbmi"
                "avx512vbmi2" "avx512vnni" "avx512bitalg" "avx512vpopcntdq" "avx512bf16"
                "avx512fp16" "avx512vp2intersect" "avxvnni" "avxifma" "avxneconvert"
                "avxvnniint8" "avxvnniint16" "aes" "vaes" "pclmulqdq" "vpclmulqdq" "gfni" "sha"
                "sha512" "sm3" "sm4" "kl" "widekl" "bmi1" "bmi2" "adx" "tbm" "lzcnt" "popcnt"
                "movbe" "cmpxchg16b" "rdrand" "rdseed" "rtm" "fxsr" "xsave" "xsaveopt" "xsavec"
                "xsaves"
            ),
        }
    }

    /// Those of these that `others` lack, in the order of their names.
    pub fn missing_in<'a>(&'a self, others: &Self) -> impl Iterator<Item = &'a str> {
        let here = self.names.iter().map(String::as_str);
        let there = others.names.iter().map(String::as_str);
        let (here, there): (BTreeSet<_>, BTreeSet<_>) = (here.collect(), there.collect());
        here.into_iter().filter(move |name| !there.contains(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_64_bit_processor_has_the_first_sets_and_lacks_none_of_its_own() {
        let here = Instructions::here();
        for name in ["sse", "sse2", "fxsr"] {
            assert!(here.names.iter().any(|one| one == name), "{name}");
        }
        assert_eq!(here.missing_in(&here).count(), 0);
    }

    #[test]
    fn what_others_lack_is_named() {
        let sets = |names: &[&str]| Instructions {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
        };
        let (small, large) = (
            sets(&["sse", "sse2"]),
            sets(&["sse2", "avx2", "avx", "sse"]),
        );
        assert_eq!(small.missing_in(&large).count(), 0);
        let missing = large.missing_in(&small).collect::<Vec<_>>();
        assert_eq!(missing, ["avx", "avx2"]);
    }
}
