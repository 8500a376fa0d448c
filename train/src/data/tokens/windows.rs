//! [`TokenWindows`]: inputs and targets of consecutive tokens; [`Packed`]: windows with the starts of their documents.

use phalanx_parallel::Content;
use phalanx_tensor::Tensor;

use super::Tokens;
use crate::Result;
use crate::data::dataset::in_range;
use crate::data::{Dataset, HOST, Permutation, Samples, wrong};

/// Windows of `context + 1` consecutive tokens: inputs `[context]` i64, and targets `[context]` i64, which are the tokens one further.
///
/// As [`Samples`], they come in an order that covers the text once an epoch. Each epoch cuts the text at another offset. As a
/// [`Dataset`], item i of draw e is the i-th window of epoch e in the order of the text; shuffled with the same seed, they are
/// the same samples.
#[derive(Clone, Debug)]
pub struct TokenWindows<T> {
    tokens: T,
    context: usize,
    /// How far from the beginning an epoch may begin, plus 1.
    shifts: u64,
    order: Permutation,
}

impl<T: Tokens> TokenWindows<T> {
    /// Windows of `context` inputs over `tokens`.
    ///
    /// # Errors
    /// If the text is shorter than a window, or the context is 0.
    pub fn new(tokens: T, context: usize, seed: u64) -> Result<TokenWindows<T>> {
        let len = tokens.len();
        if context == 0 || len <= context as u64 {
            let why = format!(
                "got {len} tokens for a context of {context}, wanted a context of at least 1 and more tokens than that"
            );
            return Err(wrong("TokenWindows", why));
        }
        // One window less than fits, so that the offset can vary.
        let count = ((len - context as u64) / context as u64).max(1);
        let order = Permutation::of_data(count, seed);
        Ok(TokenWindows { tokens, context, shifts: len - context as u64 * count, order })
    }

    /// Begins every epoch at the first token and takes every window that fits. Evaluations use it.
    #[must_use]
    pub fn unshifted(self) -> TokenWindows<T> {
        let count = (self.tokens.len() - 1) / self.context as u64;
        let order = Permutation::new(count, *self.order.stream());
        TokenWindows { shifts: 1, order, ..self }
    }

    /// Windows an epoch.
    pub fn per_epoch(&self) -> u64 {
        self.order.count()
    }

    /// The token at which window `sample` begins, counted over all epochs.
    pub fn start(&self, sample: u64) -> u64 {
        let (epoch, window) = self.order.draw(sample);
        self.window_start(epoch, window)
    }

    /// The token at which a window of an epoch begins. Windows are counted in the order of the text.
    fn window_start(&self, epoch: u64, window: u64) -> u64 {
        self.order.shift(epoch, self.shifts) + window * self.context as u64
    }

    /// The window of an item of the data set.
    pub(super) fn item_start(&self, index: usize, draw: u64) -> Result<u64> {
        in_range("TokenWindows", index, Dataset::len(self))?;
        Ok(self.window_start(draw, index as u64))
    }

    pub(super) fn tokens(&self) -> &T {
        &self.tokens
    }

    pub(super) fn context(&self) -> usize {
        self.context
    }

    /// The `context + 1` tokens of the window that begins at `start`.
    pub(super) fn read(&self, start: u64) -> Result<Vec<i64>> {
        let mut window = vec![0; self.context + 1];
        self.tokens.copy(start, &mut window)?;
        Ok(window.into_iter().map(i64::from).collect())
    }

    fn window(&self, start: u64) -> Result<Vec<Tensor>> {
        let window = self.read(start)?;
        let tensor = |skip: usize| Tensor::from_slice(&window[skip..][..self.context], &[self.context], HOST);
        Ok(vec![tensor(0)?, tensor(1)?])
    }
}

impl<T: Tokens> Samples for TokenWindows<T> {
    fn contents(&self) -> Vec<Content> {
        self.tokens.contents()
    }

    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        self.window(self.start(number))
    }

    fn name(&self, number: u64) -> String {
        format!("sample {number}, the window at token {}", self.start(number))
    }
}

impl<T: Tokens> Dataset for TokenWindows<T> {
    fn contents(&self) -> Vec<Content> {
        self.tokens.contents()
    }

    fn len(&self) -> usize {
        self.per_epoch() as usize
    }

    fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>> {
        self.window(self.item_start(index, draw)?)
    }
}

/// [`TokenWindows`] with a third tensor, by which attention stays inside a document. `starts` `[context]` i64 has, for each position,
/// the position in the window at which its document begins (0 if it begins before the window). Stages of a
/// [`Decoder`](phalanx_nn::models::Decoder) take batches of two and of three tensors: see [`Documents`](phalanx_nn::models::Documents).
///
/// A document's last token has no target in its document. Its target is -100, which losses ignore, also if it is an end-of-text token:
/// that token attends to its own document only, which does not determine the next document's first token. The trainer divides losses by
/// all positions of a batch, so its mean is the targets' mean times the share of positions with a target.
#[derive(Clone, Debug)]
pub struct Packed<T> {
    windows: TokenWindows<T>,
}

/// The target that losses ignore.
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
    fn contents(&self) -> Vec<Content> {
        self.windows.tokens.contents()
    }

    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        self.window(self.windows.start(number))
    }

    fn name(&self, number: u64) -> String {
        Samples::name(&self.windows, number)
    }
}

impl<T: Tokens> Dataset for Packed<T> {
    fn contents(&self) -> Vec<Content> {
        self.windows.tokens.contents()
    }

    fn len(&self) -> usize {
        Dataset::len(&self.windows)
    }

    fn item(&self, index: usize, draw: u64) -> Result<Vec<Tensor>> {
        self.window(self.windows.item_start(index, draw)?)
    }
}
