//! [`Documents`]: where the documents in rows of tokens begin.

use phalanx_autograd::Var;
use phalanx_tensor::DType;

use crate::{Error, Result};

/// Where the documents begin of which rows of tokens consist. Attention then stays inside a document, and positions begin anew
/// with each, as they do with Megatron's `--reset-attention-mask` and `--reset-position-ids`. So a document has the stream that it
/// has in a row of its own.
#[derive(Clone, Debug)]
pub struct Documents {
    starts: Var,
    positions: Var,
    first_keys: Var,
}

impl Documents {
    /// `starts` `[B, T]` (i64): for each position the position in its row at which its document begins. It does not decrease
    /// along a row, and is from 0 to the position itself, or attention refuses it: on a GPU when its result is asked for.
    ///
    /// # Errors
    /// If `starts` is no matrix of i64.
    pub fn new(starts: &Var) -> Result<Documents> {
        let (&[rows, length], DType::I64) = (starts.shape(), starts.dtype()) else {
            let got = format!("got starts of documents {:?} {}", starts.shape(), starts.dtype());
            return Err(Error::invalid("Documents", format!("{got}, wanted [B, T] i64")));
        };
        let positions = Var::arange(0, length as i64, 1, DType::I64, starts.device())?.sub(starts)?;
        let first_keys = starts.reshape_to(&[rows, 1, length, 1])?;
        Ok(Documents { starts: starts.clone(), positions, first_keys })
    }

    /// For each position the position at which its document begins, `[B, T]`.
    pub fn starts(&self) -> &Var {
        &self.starts
    }

    /// Each position's number in its document, `[B, T]`.
    pub fn positions(&self) -> &Var {
        &self.positions
    }

    /// The starts as a mask of attention, `[B, 1, T, 1]`.
    pub(crate) fn first_keys(&self) -> &Var {
        &self.first_keys
    }

    /// Refuses rows of other sizes.
    pub(crate) fn check(&self, rows: usize, length: usize) -> Result<()> {
        if self.starts.shape() == [rows, length] {
            return Ok(());
        }
        let got = format!("got starts of documents {:?}", self.starts.shape());
        Err(Error::invalid("Documents", format!("{got}, wanted those of the tokens, [{rows}, {length}]")))
    }
}
