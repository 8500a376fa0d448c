//! Picks the instruction set once per process and runs kernels compiled for it.

#![allow(unsafe_code)]

use std::fmt;
use std::sync::OnceLock;

#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
use super::scalar::Scalar;
use super::vector::Kernel;
#[cfg(target_arch = "x86_64")]
use super::{
    amx,
    avx2::Avx2,
    avx512::{Avx512, Avx512Bf16},
};

/// The instruction sets there are implementations for, on any CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IsaName {
    /// [`IsaName::Avx512`], and matrix products of bf16 by AMX's tiles.
    Amx,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// AArch64's baseline.
    Neon,
    /// Plain Rust, a lane at a time.
    Scalar,
}

impl IsaName {
    const ALL: [IsaName; 5] = [IsaName::Amx, IsaName::Avx512, IsaName::Avx2, IsaName::Neon, IsaName::Scalar];

    /// What `PHALANX_ISA` calls it.
    pub fn name(self) -> &'static str {
        match self {
            IsaName::Amx => "amx",
            IsaName::Avx512 => "avx512",
            IsaName::Avx2 => "avx2",
            IsaName::Neon => "neon",
            IsaName::Scalar => "scalar",
        }
    }

    /// Whether this CPU has it (and this build an implementation).
    pub fn is_available(self) -> bool {
        match self {
            // Tiles are filled by AVX-512's loads of pairs.
            #[cfg(target_arch = "x86_64")]
            IsaName::Amx => {
                IsaName::Avx512.is_available() && is_x86_feature_detected!("avx512bf16") && amx::is_usable()
            }
            #[cfg(target_arch = "x86_64")]
            IsaName::Avx512 => {
                HAS_AVX512
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            IsaName::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "aarch64")]
            IsaName::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            IsaName::Scalar => true,
            #[allow(unreachable_patterns)] // which names are left depends on the target
            _ => false,
        }
    }
}

impl fmt::Display for IsaName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The instruction sets this CPU has, best first.
pub fn available_isas() -> Vec<IsaName> {
    IsaName::ALL.into_iter().filter(|isa| isa.is_available()).collect()
}

/// The instruction set that kernels run on in this process: the one `PHALANX_ISA` names (`amx`, `avx512`, `avx2`,
/// `neon`, `scalar`), else the best this CPU has. Chosen at the first call and never changed.
///
/// # Panics
///
/// At the first call, if `PHALANX_ISA` is set to an unknown name or one this CPU lacks. A silent second choice would
/// give other bits than the ones asked for.
#[inline]
pub fn isa() -> IsaName {
    static CHOSEN: OnceLock<IsaName> = OnceLock::new();
    *CHOSEN.get_or_init(|| checked_isa().unwrap_or_else(|message| panic!("{message}")))
}

/// [`isa`] for a program that would rather tell its user than panic: to be called before anything is computed.
///
/// # Errors
/// If `PHALANX_ISA` is set to an unknown name or one this CPU lacks, with the names there are.
pub fn checked_isa() -> Result<IsaName, String> {
    static CHOSEN: OnceLock<Result<IsaName, String>> = OnceLock::new();
    let choose = || {
        let wanted = std::env::var_os("PHALANX_ISA").filter(|name| !name.is_empty());
        choose(wanted.map(|name| name.to_string_lossy().into_owned()).as_deref())
    };
    CHOSEN.get_or_init(choose).clone()
}

/// The instruction set for a value of `PHALANX_ISA`, or what to tell the user.
fn choose(wanted: Option<&str>) -> Result<IsaName, String> {
    let available = available_isas();
    let Some(wanted) = wanted else {
        return Ok(available[0]); // Scalar is always there.
    };
    available.iter().copied().find(|isa| isa.name() == wanted).ok_or_else(|| {
        let known = IsaName::ALL.iter().any(|isa| isa.name() == wanted);
        let names: Vec<_> = available.iter().map(|isa| isa.name()).collect();
        let problem = if known { "is not available on this CPU" } else { "is not an instruction set" };
        format!("PHALANX_ISA={wanted} {problem}; available here: {}", names.join(", "))
    })
}

/// Runs `kernel` on the process's instruction set, [`isa`].
#[inline]
pub(crate) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    Runner::current().run(kernel)
}

/// Runs `kernel` on `isa`, if this CPU has it.
#[cfg(test)]
pub(crate) fn dispatch_on<K: Kernel>(isa: IsaName, kernel: K) -> Option<K::Output> {
    Runner::on(isa).map(|runner| runner.run(kernel))
}

/// An instruction set this CPU was seen to have: for kernels that are called many times.
#[derive(Clone, Copy)]
pub(crate) struct Runner {
    isa: IsaName,
    /// Whether dot products of bf16 pairs are used; this CPU was seen to have them.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // it has none
    pairs: bool,
}

impl Runner {
    /// The process's, [`isa`].
    #[inline]
    pub(crate) fn current() -> Runner {
        static CURRENT: OnceLock<Runner> = OnceLock::new();
        *CURRENT.get_or_init(|| Runner { isa: isa(), pairs: has_pairs(isa()) && pairs_pay() })
    }

    /// The one named, if this CPU has it, with pairs if it comes with them.
    #[cfg(test)]
    pub(crate) fn on(isa: IsaName) -> Option<Runner> {
        isa.is_available().then(|| Runner { isa, pairs: has_pairs(isa) })
    }

    /// All that this CPU has, with pairs and without.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Runner> {
        let both = |runner: Runner| {
            let without = runner.pairs.then_some(Runner { pairs: false, ..runner });
            std::iter::once(runner).chain(without)
        };
        available_isas().into_iter().filter_map(Runner::on).flat_map(both).collect()
    }

    /// The instruction set's name.
    #[cfg(test)]
    pub(crate) fn isa(self) -> IsaName {
        self.isa
    }

    /// This runner for kernels that prepare the tiles of [`IsaName::Amx`], in which bf16 lies in pairs.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // no other has them
    pub(crate) fn for_tiles(self) -> Option<Runner> {
        (self.isa == IsaName::Amx).then_some(Runner { pairs: true, ..self })
    }

    /// Runs `kernel` on it.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: a runner is made only after its instruction set was found available.
        unsafe { trampoline(self.isa, kernel) }
    }

    /// Runs a kernel that has to do with [`Isa::dot_bf16`] where there is an instruction for pairs that [pays](pairs_pay): AVX-512's,
    /// which takes subnormal inputs for zero and makes subnormal sums zero. Elsewhere the kernel comes back.
    #[inline]
    pub(crate) fn run_on_pairs<K: Kernel>(self, kernel: K) -> Result<K::Output, K> {
        #[cfg(target_arch = "x86_64")]
        if HAS_AVX512 && self.pairs {
            // SAFETY: a runner has pairs only after they were found available.
            return Ok(unsafe { run_avx512_bf16(kernel) });
        }
        Err(kernel)
    }
}

/// Whether an instruction set of this CPU comes with dot products of bf16 pairs.
fn has_pairs(isa: IsaName) -> bool {
    #[cfg(target_arch = "x86_64")]
    if HAS_AVX512 && matches!(isa, IsaName::Avx512 | IsaName::Amx) {
        return is_x86_feature_detected!("avx512bf16");
    }
    let _ = isa;
    false
}

/// Whether a dot product of pairs takes less time than two multiply-adds. On AMD's cores it takes that of one; on Intel's since Sapphire Rapids
/// that of four (5.3 and 1.3 billion a second, measured on Emerald Rapids). The maker decides, as a measurement could decide otherwise on
/// another rank, and the bits of subnormal numbers differ.
fn pairs_pay() -> bool {
    cfg!(target_arch = "x86_64") && maker() != Maker::Intel
}

/// Whether this CPU's caches follow at most 16 streams of reads: AMD's. Of memory's speed Zen 4 gives 16 streams 0.9, 24 of them 0.6 and 32 of
/// them 0.4, where Intel's Emerald Rapids gives all.
pub(crate) fn follows_few_streams() -> bool {
    maker() == Maker::Amd
}

/// Whether this CPU reads a row's panels faster if they are prefetched into the second-level cache, and not into the first: Intel's (a Xeon with AMX). AMD's
/// Zen 5 is as fast or slower so.
pub(crate) fn prefetches_far() -> bool {
    maker() == Maker::Intel
}

/// Who makes this CPU.
#[derive(Clone, Copy, PartialEq)]
enum Maker {
    Intel,
    Amd,
    Other,
}

fn maker() -> Maker {
    #[cfg(target_arch = "x86_64")]
    {
        static MAKER: OnceLock<Maker> = OnceLock::new();
        *MAKER.get_or_init(|| {
            let name = std::arch::x86_64::__cpuid(0);
            match [name.ebx, name.edx, name.ecx].map(u32::to_le_bytes).as_flattened() {
                b"GenuineIntel" => Maker::Intel,
                b"AuthenticAMD" => Maker::Amd,
                _ => Maker::Other,
            }
        })
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        Maker::Other
    }
}

/// Unit tests with debug assertions leave AVX-512 out, to be built sooner: its bodies are those of AVX2, and tests without these assertions
/// run both.
#[cfg(target_arch = "x86_64")]
const HAS_AVX512: bool = !cfg!(all(test, debug_assertions));

/// # Safety
///
/// This CPU must have `isa`.
#[inline]
unsafe fn trampoline<K: Kernel>(isa: IsaName, kernel: K) -> K::Output {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller vouches for the CPU.
        IsaName::Avx512 | IsaName::Amx if HAS_AVX512 => unsafe { run_avx512(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller vouches for the CPU.
        IsaName::Avx2 => unsafe { run_avx2(kernel) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: the caller vouches for the CPU.
        IsaName::Neon => unsafe { run_neon(kernel) },
        _ => kernel.run::<Scalar>(),
    }
}

/// # Safety
///
/// The CPU must have the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// # Safety
///
/// The CPU must have the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn run_avx512_bf16<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512Bf16>()
}

/// # Safety
///
/// The CPU must have the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// Never inlined, so that each kernel is a function whose instructions can be counted (`scripts/other-targets loops`). Where
/// the features are not the program's own, as on x86-64, the compiler cannot inline it anyway.
///
/// # Safety
///
/// The CPU must have the features named.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
#[inline(never)]
unsafe fn run_neon<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Neon>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_or_missing_isa_is_refused_by_name() {
        assert_eq!(choose(None), Ok(available_isas()[0]));
        assert_eq!(choose(Some("scalar")), Ok(IsaName::Scalar));
        let unknown = choose(Some("sse9")).unwrap_err();
        assert!(unknown.contains("PHALANX_ISA=sse9 is not an instruction set"), "{unknown}");
        assert!(unknown.contains("scalar"), "{unknown}");
        if let Some(absent) = IsaName::ALL.into_iter().find(|isa| !isa.is_available()) {
            let message = choose(Some(absent.name())).unwrap_err();
            assert!(message.contains("is not available on this CPU"), "{message}");
        }
    }
}
