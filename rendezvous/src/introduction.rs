//! [`Introduction`]: what a visitor of the store says of itself, beside the proof that it is of the run.

/// Who visits the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Introduction {
    /// A rank's process, and the last epoch in which it was a rank. One that was started just now was in none.
    Rank { last: Option<u64> },
    /// A machine's launcher.
    Launcher,
}

impl Introduction {
    pub(super) fn bytes(self) -> Vec<u8> {
        match self {
            Introduction::Launcher => vec![0],
            Introduction::Rank { last: None } => vec![1],
            Introduction::Rank { last: Some(last) } => [&[2][..], &last.to_le_bytes()].concat(),
        }
    }

    /// None if the bytes are those of a rank that looks for rank 0 and not for a store.
    pub(super) fn of(bytes: &[u8]) -> Option<Introduction> {
        match bytes {
            [0] => Some(Introduction::Launcher),
            [1] => Some(Introduction::Rank { last: None }),
            [2, last @ ..] => {
                let last = u64::from_le_bytes(last.try_into().ok()?);
                // All that can follow have a number, too.
                (last < u64::MAX / 2).then_some(Introduction::Rank { last: Some(last) })
            }
            _ => None,
        }
    }
}
