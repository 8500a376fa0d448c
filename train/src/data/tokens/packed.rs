//! [`Packed`]: windows that know where the documents in them begin.

use phalanx_tensor::Tensor;

use super::super::{Dataset, HOST, Samples};
use super::{TokenWindows, Tokens};
use crate::Result;

/// [`TokenWindows`] with a third tensor, by which attention stays inside a document: `starts` `[context]` i64 has, for each position,
/// the position in the window at which its document begins (0 if that was before the window). Stages of a
/// [`Decoder`](phalanx_nn::models::Decoder) take such batches as they take those of two tensors: see
/// [`Documents`](phalanx_nn::models::Documents).
///
/// A document's last token has no target in its document. Its target is -100, which losses pass over, also where documents end in an
/// end-of-text token: that token sees its own document alone, of which the next one's first token does not follow. The trainer
/// divides losses by all positions of a batch, so its mean is that of the targets times their share of the positions.
#[derive(Clone, Debug)]
pub struct Packed<T> {
    windows: TokenWindows<T>,
}

/// What losses pass over.
const IGNORED: i64 = -100;

impl<T: Tokens> Packed<T> {
    /// Windows of `context` inputs over `tokens`, the same as [`TokenWindows::new`] draws.
    ///
    /// # Errors
    /// If the text is shorter than a window, or the context is 0.
    pub fn new(tokens: T, context: usize, seed: u64) -> Result<Packed<T>> {
        Ok(TokenWindows::new(tokens, context, seed)?.into())
    }

    /// See [`TokenWindows::unshifted`].
    #[must_use]
    pub fn unshifted(self) -> Packed<T> {
        self.windows.unshifted().into()
    }

    /// The windows.
    pub fn windows(&self) -> &TokenWindows<T> {
        &self.windows
    }

    fn window(&self, start: u64) -> Result<Vec<Tensor>> {
        let context = self.windows.context();
        let mut window = self.windows.read(start)?;
        let begins = self.windows.tokens().document_starts(start..start + context as u64 + 1)?;
        let begins: Vec<usize> = begins.into_iter().map(|at| (at - start) as usize).collect();
        let tensor = |values: &[i64]| Tensor::from_slice(values, &[context], HOST);
        let (inputs, starts) = (tensor(&window[..context])?, tensor(&starts(&begins, context))?);
        begins.iter().filter(|&&at| at > 0).for_each(|&at| window[at] = IGNORED);
        Ok(vec![inputs, tensor(&window[1..])?, starts])
    }
}

/// For each position the last of `begins` up to it.
fn starts(begins: &[usize], context: usize) -> Vec<i64> {
    let mut starts = vec![0; context];
    for &begin in begins.iter().filter(|&&begin| begin < context) {
        starts[begin..].fill(begin as i64);
    }
    starts
}

impl<T> From<TokenWindows<T>> for Packed<T> {
    fn from(windows: TokenWindows<T>) -> Packed<T> {
        Packed { windows }
    }
}

impl<T: Tokens> Samples for Packed<T> {
    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        self.window(self.windows.start(number))
    }

    fn name(&self, number: u64) -> String {
        Samples::name(&self.windows, number)
    }
}

impl<T: Tokens> Dataset for Packed<T> {
    fn len(&self) -> usize {
        Dataset::len(&self.windows)
    }

    fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>> {
        self.window(self.windows.item_start(index, draw)?)
    }
}
