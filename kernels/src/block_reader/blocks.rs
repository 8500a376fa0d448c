//! What the readers of several inputs that are read together share: how a result is cut into blocks ([`BlockSplit`]), the buffer that a block is
//! gathered into ([`BlockScratch`]), lines of one length ([`LineLayout`]), and the kernels that widen and transpose elements meanwhile.

#![allow(clippy::needless_range_loop)] // an index leaves the compiler nothing to inline in a kernel's body

use phalanx_tensor::{Element, Loops};

use super::{BLOCK, BlockReader};
use crate::real::{Input, Real};
use crate::simd::{Float, Isa, Kernel, LANES_MAX, Vector};

/// Elements of a [`LineFn`](crate::pointwise::LineFn)'s line at least, whatever the instruction set.
pub(crate) const GROUP: usize = 4 * LANES_MAX;

/// The buffer that blocks of one input are gathered into. A block of an input that repeats is kept for the next block.
pub(crate) struct BlockScratch<T> {
    /// Empty before the first block that is gathered: clearing it takes as long as some operations.
    elements: Vec<T>,
    /// The place in the input's period at which the kept elements begin.
    phase: usize,
    kept: usize,
    run: RunCursor,
}

impl<T: Element> BlockScratch<T> {
    pub(crate) fn new() -> BlockScratch<T> {
        BlockScratch { elements: Vec::new(), phase: 0, kept: 0, run: RunCursor::default() }
    }

    /// [`BlockReader::block`].
    #[inline]
    pub(crate) fn block<'b>(
        &'b mut self,
        source: &'b BlockReader<'_, T>,
        start: usize,
        len: usize,
    ) -> &'b [T] {
        if self.keeps(source.period, start, len) {
            return &self.elements[..len];
        }
        match self.run.find(source, start, len).filter(|_| source.period == 0) {
            Some((at, 1)) => &source.elements[source.offset + at..][..len],
            _ => source.block(start, len, self.room()),
        }
    }

    /// [`BlockReader::input`]. A block whose elements are all the same is [`Input::Same`], and not gathered.
    #[inline]
    pub(crate) fn input<'b, S: Real<Wide = T>>(
        &'b mut self,
        source: &'b BlockReader<'_, S>,
        start: usize,
        len: usize,
    ) -> Input<'b, T> {
        if source.period <= 1
            && let Some((at, stride)) = self.run.find(source, start, len)
        {
            let lying = &source.elements[source.offset + at..];
            return if stride == 0 { Input::Same(lying[0].widen()) } else { S::input(&lying[..len]) };
        }
        if !self.keeps(source.period, start, len) {
            source.copy_wide(start, &mut self.room()[..len]);
        }
        Input::Wide(&self.elements[..len])
    }

    fn room(&mut self) -> &mut [T] {
        self.elements.resize(BLOCK, T::zeroed());
        &mut self.elements
    }

    /// Whether the buffer holds this block already. If not, the caller gathers it now.
    #[inline]
    fn keeps(&mut self, period: usize, start: usize, len: usize) -> bool {
        if period == 0 {
            return false;
        }
        let phase = start % period;
        if self.phase == phase && self.kept >= len {
            return true;
        }
        (self.phase, self.kept) = (phase, len);
        false
    }
}

/// A cursor over the runs of a source: the one that was read last. The next one is found without divisions.
#[derive(Default)]
struct RunCursor {
    /// The elements of the run, in row-major order.
    begin: usize,
    end: usize,
    /// The place of the first element.
    at: usize,
    /// How many runs follow along the same dimension.
    further: usize,
}

impl RunCursor {
    /// The place of element `start` and the stride of the elements from there on, 0 or 1, if `len` of them are in one run.
    #[inline]
    fn find<T>(&mut self, source: &BlockReader<'_, T>, start: usize, len: usize) -> Option<(usize, usize)> {
        let Some(loops) = source.loops.as_deref() else { return Some((start, 1)) };
        let [stride] = loops.inner_strides();
        if stride > 1 {
            return None;
        }
        if start < self.begin || start >= self.end {
            self.seek(loops, start);
        }
        (start + len <= self.end).then(|| (self.at + (start - self.begin) * stride, stride))
    }

    fn seek(&mut self, loops: &Loops<1>, start: usize) {
        let (sizes, strides, inner) = (loops.sizes(), loops.strides(), loops.inner().max(1));
        if start == self.end && self.further > 0 {
            let [stride] = strides[strides.len() - 2];
            *self = RunCursor {
                begin: start,
                end: start + inner,
                at: self.at + stride,
                further: self.further - 1,
            };
            return;
        }
        let run = start / inner;
        let further =
            if sizes.len() > 1 { sizes[sizes.len() - 2] - 1 - run % sizes[sizes.len() - 2] } else { 0 };
        *self = RunCursor { begin: run * inner, end: (run + 1) * inner, at: loops.start(run)[0], further };
    }
}

/// The layout of lines of one length in a source, from some line on.
#[derive(Clone, Copy)]
pub(crate) struct LineLayout {
    at: usize,
    /// From one element of a line to the next: 0 or 1.
    stride: usize,
    /// From one line to the next.
    pub(crate) step: usize,
    /// How many lines have this layout, from this one on.
    pub(crate) count: usize,
}

/// The length of lines in which the elements of every source are neighbours or all the same, if such lines are long and not all
/// sources are contiguous.
pub(crate) fn line_width<T: Element>(sources: &[BlockReader<'_, T>]) -> Option<usize> {
    let width = sources.iter().map(BlockReader::run).min().filter(|&width| width >= GROUP)?;
    let fits = |source: &BlockReader<'_, T>| {
        !source.is_across() && (source.is_contiguous() || source.run().is_multiple_of(width))
    };
    (width < usize::MAX && sources.iter().all(fits)).then_some(width)
}

impl<T: Real> BlockReader<'_, T> {
    /// The layout of lines of [`line_width`] from the one that has element `start` on.
    pub(crate) fn line_layout(&self, start: usize, width: usize) -> LineLayout {
        let Some(loops) = self.loops.as_deref() else {
            return LineLayout { at: start, stride: 1, step: width, count: usize::MAX };
        };
        let (sizes, inner, [stride]) = (loops.sizes(), loops.inner(), loops.inner_strides());
        let (run, skip) = (start / inner, start % inner);
        let at = loops.start(run)[0] + skip * stride;
        match sizes.len().checked_sub(2) {
            Some(outer) if inner == width => {
                let [step] = loops.strides()[outer];
                LineLayout { at, stride, step, count: sizes[outer] - run % sizes[outer] }
            }
            _ => LineLayout { at, stride, step: width * stride, count: ((inner - skip) / width).max(1) },
        }
    }

    /// `len` elements of each of the first `count` such lines. If each line is one number repeated, the numbers go to `room`.
    pub(crate) fn read_lines<'b>(
        &'b self,
        lying: LineLayout,
        [count, len]: [usize; 2],
        room: &'b mut [T::Wide],
    ) -> Input<'b, T::Wide> {
        let from = &self.elements[self.offset + lying.at..];
        match (lying.stride, lying.step) {
            (1, step) => T::input(&from[..(count - 1) * step + len]),
            (_, 0) => Input::Same(from[0].widen()),
            (_, step) => {
                let room = &mut room[..count];
                room.iter_mut().zip(from.iter().step_by(step)).for_each(|(to, x)| *to = x.widen());
                Input::Each(room)
            }
        }
    }
}

/// How a result is cut into blocks of up to [`BLOCK`] elements, so that little is gathered. If all inputs have long runs, blocks
/// end where runs end, so that the neighbours in a run are read in place. Else blocks are whole periods of an input that repeats.
#[derive(Clone, Copy)]
pub(crate) struct BlockSplit {
    run: usize,
    block: usize,
}

impl BlockSplit {
    /// For inputs that are read together.
    pub(crate) fn of<T: Element, const N: usize>(sources: &[BlockReader<'_, T>; N]) -> BlockSplit {
        sources.iter().fold(BlockSplit::NONE, |cut, source| cut.with(source))
    }

    /// For inputs that are contiguous.
    pub(crate) const NONE: BlockSplit = BlockSplit { run: usize::MAX, block: BLOCK };

    /// With another input.
    pub(crate) fn with<T: Element>(self, source: &BlockReader<'_, T>) -> BlockSplit {
        let run = source.loops.as_ref().map_or(usize::MAX, |loops| loops.inner());
        match source.period {
            0 if (BLOCK / 4..self.run).contains(&run) => {
                BlockSplit { run, block: run.div_ceil(run.div_ceil(BLOCK)) }
            }
            2.. if self.run == usize::MAX => {
                BlockSplit { block: BLOCK / source.period * source.period, ..self }
            }
            _ => self,
        }
    }

    /// Calls `f` with each block of a piece and the number of its first element; `start` is the piece's.
    #[inline]
    pub(crate) fn blocks<T>(self, mut start: usize, mut piece: &mut [T], mut f: impl FnMut(usize, &mut [T])) {
        let mut at = start % self.run;
        let mut left = self.block - at % self.block;
        while !piece.is_empty() {
            let len = left.min(self.run - at).min(piece.len());
            let (block, rest) = piece.split_at_mut(len);
            f(start, block);
            (start, piece, left) = (start + len, rest, self.block);
            at = if at + len == self.run { 0 } else { at + len };
        }
    }
}

/// Widens and transposes at most [`LANES_MAX`] rows of `width` elements that lie across memory: element i of all rows is at `from[i * stride..]`.
pub(super) struct WidenTransposed<'a, T: Real> {
    pub(super) from: &'a [T],
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) to: &'a mut [T::Wide],
}

impl<T: Real> Kernel for WidenTransposed<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        for row in (0..self.rows).step_by(lanes) {
            for column in (0..self.width).step_by(lanes) {
                let sizes = [lanes.min(self.rows - row), lanes.min(self.width - column)];
                // A square whose size is known stays in registers.
                match sizes == [lanes; 2] {
                    true => self.square::<S>([row, column], [lanes; 2]),
                    false => self.square::<S>([row, column], sizes),
                }
            }
        }
    }
}

impl<T: Real> WidenTransposed<'_, T> {
    #[inline(always)]
    fn square<S: Isa>(&mut self, [row, column]: [usize; 2], [rows, columns]: [usize; 2]) {
        let mut square = [<T::Wide as Float>::Vec::<S>::zero(); LANES_MAX];
        for (i, vector) in square.iter_mut().enumerate().take(columns) {
            *vector = T::load::<S>(&self.from[(column + i) * self.stride + row..][..rows]);
        }
        <T::Wide as Float>::Vec::<S>::transpose(&mut square);
        for (i, vector) in square.iter().enumerate().take(rows) {
            vector.store_partial(&mut self.to[(row + i) * self.width + column..][..columns]);
        }
    }
}

/// Widens lines of `len` elements that begin `stride` apart.
pub(super) struct WidenLines<'a, T: Real> {
    pub(super) from: &'a [T],
    pub(super) stride: usize,
    pub(super) len: usize,
    pub(super) to: &'a mut [T::Wide],
}

impl<T: Real> Kernel for WidenLines<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let lanes = <T::Wide as Float>::Vec::<S>::LANES;
        let lines = self.to.len() / self.len.max(1);
        for (line, to) in self.to.chunks_exact_mut(self.len.max(1)).enumerate() {
            let from = &self.from[line * self.stride..][..self.len];
            for (from, to) in from.chunks(lanes).zip(to.chunks_mut(lanes)) {
                // The next lines are prefetched meanwhile.
                let next = from.as_ptr().wrapping_add(lines * self.stride);
                <T::Wide as Float>::Vec::<S>::prefetch_far(next.cast());
                match from.len() == lanes {
                    true => T::load::<S>(from).store(to),
                    false => T::load::<S>(from).store_partial(to),
                }
            }
        }
    }
}

/// Widens single elements that lie `stride` apart.
pub(super) struct WidenStrided<'a, T: Real> {
    pub(super) from: &'a [T],
    pub(super) stride: usize,
    pub(super) to: &'a mut [T::Wide],
}

impl<T: Real> Kernel for WidenStrided<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self) {
        let WidenStrided { from, stride, to } = self;
        // The compiler makes vectors where it knows the stride.
        match stride {
            2 => widen_apart::<T, 2>(from, to),
            3 => widen_apart::<T, 3>(from, to),
            4 => widen_apart::<T, 4>(from, to),
            _ => {
                for (to, &x) in to.iter_mut().zip(from.iter().step_by(stride)) {
                    *to = x.widen();
                }
            }
        }
    }
}

#[inline(always)]
fn widen_apart<T: Real, const N: usize>(from: &[T], to: &mut [T::Wide]) {
    let (whole, rest) = from.as_chunks::<N>();
    let count = whole.len().min(to.len());
    let (to, last) = to.split_at_mut(count);
    for (to, x) in to.iter_mut().zip(whole) {
        *to = x[0].widen();
    }
    for (to, x) in last.iter_mut().zip(rest) {
        *to = x.widen();
    }
}
