//! Which of cuBLASLt's algorithms computes a form of product: the first that the library's heuristic names, or the one that was the fastest
//! of [`CANDIDATES`] on this kind of GPU.
//!
//! Algorithms add in different orders, so the choice decides bits, and times differ from one measurement to the next. All ranks of a run,
//! and a run and its resumed one, must choose alike. So a choice is made once for each kind of GPU, version of the library and form,
//! and kept in the kernel cache. The first process that names the file decides; all others, those that have timed the same form meanwhile
//! too, use what the file says. Without a file that can be read, all use the heuristic's first.

use std::sync::OnceLock;

use crate::cache::{Cache, Kind};
use crate::context::Context;
use crate::product::ProductForm;
use crate::vendor::Failure;

/// `cublasLtMatmulAlgo_t`, which may be kept and used again with the same version of the library.
pub(super) type Algorithm = [u64; 8];

/// How many of the heuristic's algorithms are timed.
pub(super) const CANDIDATES: usize = 8;

const SETTING: &str = "PHALANX_CUDA_ALGORITHMS";

/// What the setting asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The heuristic's first algorithm. The default.
    First,
    /// The one that is kept, else the first.
    Kept,
    /// The one that is kept; else all candidates are timed, and the fastest one is kept.
    Timed,
    /// None: all products are computed by the caller's own kernels.
    Own,
}

impl Choice {
    /// What the environment asks for, looked up once.
    pub(super) fn asked() -> Result<Choice, Failure> {
        static ASKED: OnceLock<Result<Choice, Failure>> = OnceLock::new();
        let asked = || match std::env::var_os(SETTING) {
            Some(text) => Choice::parse(&text.to_string_lossy()),
            None => Ok(Choice::First),
        };
        ASKED.get_or_init(asked).clone()
    }

    fn parse(text: &str) -> Result<Choice, Failure> {
        match text {
            "" | "first" => Ok(Choice::First),
            "kept" => Ok(Choice::Kept),
            "timed" => Ok(Choice::Timed),
            "own" => Ok(Choice::Own),
            other => {
                let text = format!("{SETTING} is `{other}`, wanted `first`, `kept`, `timed` or `own`");
                Err(Failure { code: u32::MAX, text })
            }
        }
    }
}

/// Everything that decides which algorithm is the fastest, and on what an algorithm may be used.
pub(super) fn key(context: &Context, version: usize, compute: &str, form: &ProductForm) -> String {
    // Whether products are added to C changes no algorithm's fitness, and sums must have the bits of the first one, which is stored.
    let form = ProductForm { accumulate: false, ..*form };
    let (name, capability, processors) = (context.name(), context.capability(), context.processors());
    format!("cuBLASLt {version}, {name} {capability:?} of {processors}, {compute}: {form:?}")
}

/// The algorithm that is kept under a key.
pub(super) fn kept(key: &str) -> Option<Algorithm> {
    let content = Cache::of_environment().load(Kind::Algorithm, key)?;
    let words: Vec<u64> = content
        .chunks_exact(8)
        .map(|word| word.iter().rfold(0, |all, &byte| all << 8 | u64::from(byte)))
        .collect();
    words.try_into().ok().filter(|_| content.len() == size_of::<Algorithm>())
}

/// Keeps an algorithm unless another process has kept one. Returns the one that is kept now; none if nothing can be kept.
pub(super) fn keep(key: &str, algorithm: Algorithm) -> Option<Algorithm> {
    // It fails where a process has kept one, or the folder cannot be written.
    let content = algorithm.map(u64::to_le_bytes).concat();
    let _ = Cache::of_environment().store_first(Kind::Algorithm, key, &content);
    kept(key)
}

/// Which of some times is the shortest; of equal ones the first.
pub(super) fn fastest(times: &[f32]) -> Option<usize> {
    let finite = times.iter().enumerate().filter(|(_, time)| time.is_finite());
    finite.min_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_time_wins_and_the_first_of_equal_ones() {
        assert_eq!(fastest(&[3.0, 1.0, 2.0, 1.0]), Some(1));
        assert_eq!(fastest(&[f32::INFINITY, 5.0, f32::NAN]), Some(1));
        assert_eq!(fastest(&[f32::INFINITY]), None);
    }

    #[test]
    fn an_unknown_setting_is_refused_by_its_name() {
        assert_eq!(Choice::parse("timed").unwrap(), Choice::Timed);
        let refused = Choice::parse("fast").unwrap_err().text;
        assert!(
            refused.contains("PHALANX_CUDA_ALGORITHMS is `fast`") && refused.contains("`kept`"),
            "{refused}"
        );
    }
}
