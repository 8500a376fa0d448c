//! Batches of token windows: shuffled by a seed, cut by rank and micro-batch, prefetched by a thread. [`Permutation`] is the shuffled order.
//!
//! A step's batch is a function of (seed, step), so a checkpoint saves the number of the step and nothing else about the data.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use phalanx_autograd::Var;
use phalanx_tensor::{Category, Context, Device, PhiloxStream, RngKey, Tensor, even_piece};

use crate::{Error, Result};

/// Divides `0..n` into `parts` contiguous ranges whose lengths differ by at most one; the first `n % parts` are longer.
///
/// ```
/// assert_eq!(phalanx_nn::cut(7, 3), [0..3, 3..5, 5..7]);
/// ```
pub fn cut(n: usize, parts: usize) -> Vec<Range<usize>> {
    (0..parts).map(|i| even_piece(n, parts, i)).collect()
}

/// Windows of `context + 1` consecutive tokens: inputs, and targets one token further. Their shuffled order covers the text once in
/// each epoch. Each epoch cuts the text at another offset.
#[derive(Clone, Debug)]
pub struct Windows {
    tokens: Arc<[u32]>,
    context: usize,
    /// The order of an epoch's windows.
    order: Permutation,
}

impl Windows {
    /// Windows of `context` inputs over `tokens`.
    ///
    /// # Errors
    /// If the text is shorter than a window, or the context is 0.
    pub fn new(tokens: impl Into<Arc<[u32]>>, context: usize, seed: u64) -> Result<Windows> {
        let tokens = tokens.into();
        if context == 0 || tokens.len() <= context {
            let why = format!(
                "got {} tokens for a context of {context}, wanted a context of at least 1 and more tokens than that",
                tokens.len()
            );
            return Err(Error::invalid("Windows", why));
        }
        // One window less than fits, so that the offset can vary.
        let count = ((tokens.len() - context) / context).max(1) as u64;
        Ok(Windows { tokens, context, order: Permutation::of_data(count, seed) })
    }

    /// Windows in an epoch.
    pub fn per_epoch(&self) -> u64 {
        self.order.count()
    }

    /// Where the `sample`-th window drawn begins, counted over all epochs.
    pub fn start(&self, sample: u64) -> usize {
        let (epoch, window) = self.order.draw(sample);
        let shifts = (self.tokens.len() - self.context * self.per_epoch() as usize) as u64;
        self.order.shift(epoch, shifts) as usize + window as usize * self.context
    }

    /// Inputs and targets of rows of a step.
    fn rows(&self, first: u64, rows: Range<usize>) -> (Vec<i64>, Vec<i64>) {
        let window = |row: usize| &self.tokens[self.start(first + row as u64)..][..=self.context];
        let part = |skip: usize| {
            let tokens = rows.clone().flat_map(|row| &window(row)[skip..skip + self.context]);
            tokens.map(|&token| i64::from(token)).collect()
        };
        (part(0), part(1))
    }
}

/// The rows of one step that this rank, or one of its micro-batches, computes.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The tensors of the rows, each with a first dimension of rows. For tokens they are inputs `[rows, context]` i64 and targets, the
    /// tokens one further.
    pub tensors: Vec<Tensor>,
    /// The number of the first row in the global batch, for [`Context::batch_offset`].
    pub first_row: usize,
}

impl Batch {
    /// Its `N` tensors as variables: `let [inputs, targets] = batch.vars()?`.
    ///
    /// # Errors
    /// If it has another number of tensors.
    pub fn vars<const N: usize>(&self) -> Result<[Var; N]> {
        let vars: Vec<Var> = self.tensors.iter().cloned().map(Var::new).collect();
        let wrong = |vars: Vec<Var>| {
            Error::invalid("batch", format!("got rows of {} tensors, wanted {N}", vars.len()))
        };
        vars.try_into().map_err(wrong)
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.tensors.first().and_then(|t| t.shape().first().copied()).unwrap_or(0)
    }
}

/// Tokens of a run of rows: inputs, targets.
type Rows = (Vec<i64>, Vec<i64>);

/// Steps of batches, prefetched by one thread. The thread reads tokens. Tensors are made when a step asks for them, so that a device's
/// ledger does not depend on how far ahead the thread is.
pub struct Loader {
    rows: Option<Receiver<Vec<Rows>>>,
    /// The error of the settings, if they make no sense.
    problem: Option<String>,
    context: usize,
    pieces: Vec<Range<usize>>,
    device: Device,
    thread: Option<JoinHandle<()>>,
    position: u64,
}

/// Steps that the thread prefetches.
const AHEAD: usize = 2;

impl Loader {
    /// From step `position` on, global batches of `batch` windows, of which each step yields the runs of rows in
    /// `pieces` (see [`cut`]): a rank's rows, cut into micro-batches. [`Loader::next_step`] refuses a batch of 0 and pieces
    /// that do not lie in the batch.
    pub fn new(
        windows: Windows,
        batch: usize,
        pieces: Vec<Range<usize>>,
        device: Device,
        position: u64,
    ) -> Loader {
        let (send, rows) = sync_channel(AHEAD);
        let (context, read) = (windows.context, pieces.clone());
        let outside = pieces.iter().find(|rows| rows.start > rows.end || rows.end > batch);
        let problem = match outside {
            _ if batch == 0 => Some("got batches of 0 windows, wanted at least 1".to_string()),
            Some(rows) => Some(format!("got the rows {rows:?}, wanted rows of a batch of {batch}")),
            None => None,
        };
        let read_on = problem.is_none();
        let thread = std::thread::spawn(move || {
            let step = |step: u64| -> Vec<Rows> {
                read.iter().map(|rows| windows.rows(step * batch as u64, rows.clone())).collect()
            };
            // Ends when the receiver is dropped.
            (position..).take_while(|_| read_on).try_for_each(|at| send.send(step(at)).ok());
        });
        Loader { rows: Some(rows), problem, context, pieces, device, thread: Some(thread), position }
    }

    /// The next step's batches.
    ///
    /// # Errors
    /// If the batch is 0, a piece does not lie in it, or a tensor cannot be allocated.
    pub fn next_step(&mut self) -> Result<Vec<Batch>> {
        if let Some(problem) = &self.problem {
            return Err(Error::invalid("Loader", problem.as_str()));
        }
        let received = self.rows.as_ref().and_then(|rows| rows.recv().ok());
        let rows = received.ok_or_else(|| Error::invalid("data", "the reading thread has ended"))?;
        self.position += 1;
        let _category = Context::with(|c| c.category = Category::Buffers);
        let batch = |(piece, (inputs, targets)): (&Range<usize>, Rows)| {
            let tensor = |v: Vec<i64>| Tensor::from_vec(v, &[piece.len(), self.context], self.device);
            Ok(Batch { tensors: vec![tensor(inputs)?, tensor(targets)?], first_row: piece.start })
        };
        self.pieces.iter().zip(rows).map(batch).collect()
    }

    /// The number of the next step. A checkpoint saves it.
    pub fn position(&self) -> u64 {
        self.position
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // The thread ends when it finds the channel closed.
        drop(self.rows.take());
        if let Some(thread) = self.thread.take() {
            // Errors come through the channel. A panic of the thread is dropped with the loader.
            let _ = thread.join();
        }
    }
}

/// The site of the data's random draws.
const SITE: u64 = 0x6461_7461;

/// The numbers `0 .. count` in a random order for each epoch. Each index is computed by itself, in constant memory.
///
/// It is a Feistel network over the next even power of two, applied again until the result is below `count`. It uses lanes 1 and up of
/// the stream; [`Permutation::shift`] uses lane 0.
/// Source: Black and Rogaway: Ciphers with arbitrary finite domains (2002).
#[derive(Clone, Debug)]
pub struct Permutation {
    count: u64,
    stream: PhiloxStream,
}

impl Permutation {
    /// Orders of `0 .. count`, drawn from `stream`. A count of 0 is taken for 1.
    pub fn new(count: u64, stream: PhiloxStream) -> Permutation {
        Permutation { count: count.max(1), stream }
    }

    /// The orders of `count` items of a run's data, drawn by the run's seed.
    pub fn of_data(count: u64, seed: u64) -> Permutation {
        Permutation::new(count, RngKey { seed, step: 0 }.site(SITE))
    }

    /// How many numbers are ordered.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The random numbers that the order is made of.
    pub fn stream(&self) -> &PhiloxStream {
        &self.stream
    }

    /// A random number below `shifts` for each epoch. Windows of a text begin so many tokens later in that epoch.
    pub fn shift(&self, epoch: u64, shifts: u64) -> u64 {
        let [a, b, ..] = self.stream.block(epoch, 0);
        ((u64::from(a) << 32) | u64::from(b)) % shifts
    }

    /// The number at `index` of the epoch's order.
    ///
    /// # Panics
    /// If `index` is not below the count.
    pub fn at(&self, epoch: u64, index: u64) -> u64 {
        assert!(index < self.count, "Permutation: got place {index}, wanted one below {}", self.count);
        let half = (64 - (self.count - 1).leading_zeros()).div_ceil(2).max(1);
        let mask = (1u64 << half) - 1;
        let mut number = index;
        loop {
            let (mut left, mut right) = (number >> half, number & mask);
            for round in 0..4 {
                let [word, ..] = self.stream.block(epoch, 1 + round + (right << 3));
                (left, right) = (right, left ^ (u64::from(word) & mask));
            }
            number = (left << half) | right;
            if number < self.count {
                return number;
            }
        }
    }

    /// The epoch of a sample, which is counted over all epochs, and its number in that epoch's order.
    pub fn draw(&self, sample: u64) -> (u64, u64) {
        let (epoch, index) = (sample / self.count, sample % self.count);
        (epoch, self.at(epoch, index))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn windows(n: u32, context: usize) -> Windows {
        Windows::new((0..n).collect::<Vec<_>>(), context, 7).unwrap()
    }

    #[test]
    fn an_epoch_covers_every_window_once_and_the_next_is_another() {
        for (n, context) in [(2, 1), (10, 3), (9, 8), (1000, 7), (5000, 4)] {
            let windows = windows(n, context);
            let epoch = |e: u64| -> Vec<usize> {
                (0..windows.per_epoch()).map(|i| windows.start(e * windows.per_epoch() + i)).collect()
            };
            let mut sorted = epoch(3);
            sorted.sort_unstable();
            assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] == context), "{n} {context}");
            assert!(sorted[sorted.len() - 1] + context < n as usize);
            assert!(n < 1000 || epoch(0) != epoch(1));
        }
    }

    #[test]
    fn a_loader_continues_where_another_stopped_and_pieces_are_the_whole() {
        let read = |pieces: Vec<Range<usize>>, from: u64, steps: usize| -> Vec<Vec<i64>> {
            let mut loader = Loader::new(windows(500, 5), 6, pieces, Device::CPU, from);
            let step = |l: &mut Loader| -> Vec<i64> {
                l.next_step().unwrap().iter().flat_map(|b| b.tensors[1].to_vec::<i64>().unwrap()).collect()
            };
            (0..steps).map(|_| step(&mut loader)).collect()
        };
        let whole = read(std::iter::once(0..6).collect(), 0, 8);
        assert_eq!(whole[5..], read(cut(6, 4), 5, 3));
        let mut loader = Loader::new(windows(500, 5), 6, cut(6, 4), Device::CPU, 0);
        let first = loader.next_step().unwrap();
        assert_eq!(first.iter().map(|b| b.first_row).collect::<Vec<_>>(), [0, 2, 4, 5]);
        let (x, y): (Vec<i64>, Vec<i64>) =
            (first[0].tensors[0].to_vec().unwrap(), first[0].tensors[1].to_vec().unwrap());
        assert_eq!((x[1..5].to_vec(), x[0] + 5), (y[..4].to_vec(), y[4]));
    }

    #[test]
    fn a_batch_of_nothing_and_rows_outside_the_batch_are_refused() {
        for (batch, rows) in [(0, 0..0), (4, 2..5), (4, 0..usize::MAX)] {
            let mut loader = Loader::new(windows(500, 5), batch, vec![rows], Device::CPU, 0);
            let error = loader.next_step().unwrap_err().to_string();
            assert!(error.starts_with("Loader: got"), "{error}");
        }
    }

    #[test]
    fn a_text_shorter_than_a_window_is_refused() {
        assert!(Windows::new(vec![1, 2, 3], 3, 0).unwrap_err().to_string().contains("context of 3"));
        let refused = Windows::new(vec![], 1, 0).err().unwrap().to_string();
        assert!(refused.contains("Windows: got 0 tokens for a context of 1"), "{refused}");
    }

    proptest! {
        #[test]
        fn every_epoch_has_every_number_once(count in 1u64..3000, seed: u64, epoch: u64) {
            let order = Permutation::of_data(count, seed);
            let mut seen: Vec<u64> = (0..count).map(|index| order.at(epoch, index)).collect();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..count));
        }

        #[test]
        fn different_places_of_a_huge_count_have_different_numbers(count in 1u64 << 40.., index: u64, step in 1u64..1000) {
            let order = Permutation::of_data(count, 1);
            let (a, b) = (index % count, (index % count + step) % count);
            let (x, y) = (order.at(0, a), order.at(0, b));
            prop_assert!(x < count && y < count && x != y);
        }
    }

    #[test]
    fn every_small_count_and_every_count_beside_a_power_of_two_is_a_permutation() {
        for count in (1..70).chain([127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097]) {
            let order = Permutation::of_data(count, 3);
            let mut seen: Vec<u64> = (0..count).map(|index| order.at(5, index)).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn epochs_and_seeds_have_orders_of_their_own_and_repeat() {
        let order = |seed: u64, epoch: u64| -> Vec<u64> {
            let order = Permutation::of_data(50, seed);
            (0..50).map(|index| order.at(epoch, index)).collect()
        };
        assert_eq!(order(1, 2), order(1, 2));
        assert!(order(1, 2) != order(1, 3) && order(1, 2) != order(2, 2));
        assert!(!order(1, 0).into_iter().eq(0..50));
    }

    #[test]
    fn samples_are_counted_over_epochs() {
        let order = Permutation::of_data(7, 4);
        assert_eq!(order.draw(16), (2, order.at(2, 2)));
        assert_eq!(Permutation::of_data(0, 4).draw(3), (3, 0));
    }

    #[test]
    #[should_panic(expected = "got place 7, wanted one below 7")]
    fn a_place_outside_is_a_panic_and_no_endless_walk() {
        Permutation::of_data(7, 4).at(0, 7);
    }
}
