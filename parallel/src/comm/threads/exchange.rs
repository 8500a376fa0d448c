//! Moves the elements of a complete call between the tensors of all ranks, on the pool's threads: [`exchange`] of a collective,
//! [`deliver`] of a message. The rank that comes last calls them (`World::carry_out`).

use std::sync::Mutex;

use phalanx_kernels::combine::{BLOCK, Block, Summand};
use phalanx_tensor::{DType, Pool, Read, Tensor, Write, bf16, f16, unpoisoned};

use crate::comm::plan::{Segment, Side, Transfer, plan};
use crate::comm::{Call, Error, Reduction, Result, Signature};

/// Bytes of a rank that a thread works on at a time.
const PIECE_BYTES: usize = 128 << 10;

/// Carries out a collective of which all ranks' `calls` are given; `ranks` are their numbers in the whole run.
pub(super) fn exchange(calls: &[&Call], ranks: &[usize], sequence: u64, pool: &Pool) -> Result<()> {
    let signatures: Vec<&Signature> = calls.iter().map(|call| &call.signature).collect();
    if let Some(error) = Signature::mismatch(&signatures, ranks, sequence) {
        return Err(error);
    }
    let in_place: Vec<bool> = calls.iter().map(|call| call.input.is_none()).collect();
    carry_out(calls, ranks, &plan(&signatures, &in_place), pool)
}

/// From the sender's tensor to the receiver's, the pair's message number `sequence`.
pub(super) fn deliver(send: &Call, recv: &Call, ranks: [usize; 2], sequence: u64, pool: &Pool) -> Result<()> {
    if let Some(error) = Signature::undeliverable(&send.signature, &recv.signature, ranks, sequence) {
        return Err(error);
    }
    let range = 0..recv.signature.counts[0];
    let from = Segment { rank: 0, side: Side::Input, range: range.clone() };
    let to = Segment { rank: 1, side: Side::Output, range };
    let message = Transfer { owner: 0, sources: vec![from], dests: vec![to] };
    if message.dests[0].range.is_empty() || recv.signature.on_gpus {
        return Ok(());
    }
    carry_out(&[send, recv], &ranks, &[message], pool)
}

fn carry_out(calls: &[&Call], ranks: &[usize], plan: &[Transfer], pool: &Pool) -> Result<()> {
    let Some(first) = calls.first().filter(|_| !plan.is_empty()) else { return Ok(()) };
    let run = match first.dtype() {
        DType::F64 => typed::<f64>,
        DType::F32 => typed::<f32>,
        DType::BF16 => typed::<bf16>,
        DType::F16 => typed::<f16>,
        DType::I64 => typed::<i64>,
        DType::I32 => typed::<i32>,
        DType::U8 | DType::Bool => typed::<u8>,
    };
    run(calls, ranks, plan, pool)
}

fn typed<T: Summand>(calls: &[&Call], ranks: &[usize], plan: &[Transfer], pool: &Pool) -> Result<()> {
    let written: Vec<bool> =
        (0..calls.len()).map(|r| plan.iter().any(|t| t.dests.iter().any(|d| d.rank == r))).collect();
    let mut outputs: Vec<Option<Tensor>> = calls.iter().map(|call| call.output.clone()).collect();
    refuse_shared(&outputs, &written, calls, ranks)?;
    let is_meta = |tensor: &Tensor| tensor.device().is_meta();
    if outputs.iter().flatten().any(is_meta) {
        let elements = calls.iter().position(|c| c.output.iter().chain(&c.input).any(|t| !is_meta(t)));
        if let Some(r) = elements {
            let why = format!("rank {} brought elements to others' meta tensors", ranks[r]);
            return Err(Error::invalid(calls[0].kind().name(), why));
        }
        outputs
            .iter_mut()
            .zip(&written)
            .filter(|(_, w)| **w)
            .for_each(|(t, _)| t.iter_mut().for_each(Tensor::bump_version));
        return Ok(());
    }
    let op = calls[0].kind().name();
    let blame =
        |r: usize| move |e: phalanx_tensor::Error| Error::Failed { rank: ranks[r], cause: e.to_string() };
    let inputs = calls.iter().enumerate().map(|(r, call)| {
        call.input.as_ref().map(|tensor| View::read(tensor, op).map_err(blame(r))).transpose()
    });
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let mut opened = Vec::with_capacity(outputs.len());
    for (r, output) in outputs.iter_mut().enumerate() {
        let view = output.as_mut().map(|tensor| match written[r] {
            true => View::write(tensor, op),
            false => View::read(tensor, op),
        });
        opened.push(view.transpose().map_err(blame(r))?);
    }
    let mut sides: Vec<Output<T>> = opened.iter_mut().map(Output::new).collect();
    let pieces = cut(plan, &inputs, &mut sides);
    let by = calls[0].signature.by;
    pool.for_each(pieces.len(), |i| unpoisoned(pieces[i].lock()).run(by));
    Ok(())
}

/// Tensors that are written must not share a storage with any other rank's.
fn refuse_shared(
    outputs: &[Option<Tensor>],
    written: &[bool],
    calls: &[&Call],
    ranks: &[usize],
) -> Result<()> {
    let tensors = |r: usize| outputs[r].iter().chain(&calls[r].input);
    for (a, output) in outputs.iter().enumerate().filter(|(a, _)| written[*a]) {
        let Some(output) = output.as_ref().filter(|t| t.numel() > 0) else { continue };
        let shared = (0..calls.len()).find(|&b| b != a && tensors(b).any(|t| t.shares_storage(output)));
        if let Some(b) = shared {
            let why =
                format!("ranks {} and {} brought views of one storage that is written", ranks[a], ranks[b]);
            return Err(Error::invalid(calls[0].kind().name(), why));
        }
    }
    Ok(())
}

/// A tensor's storage, open, and which of its elements are the tensor's.
enum View<'a, T> {
    Read(Read<'a, T>, std::ops::Range<usize>),
    Write(Write<'a, T>, std::ops::Range<usize>),
}

impl<'a, T: Summand> View<'a, T> {
    fn read(tensor: &'a Tensor, op: &'static str) -> phalanx_tensor::Result<View<'a, T>> {
        Ok(View::Read(tensor.read(op)?, tensor.offset()..tensor.offset() + tensor.numel()))
    }

    fn write(tensor: &'a mut Tensor, op: &'static str) -> phalanx_tensor::Result<View<'a, T>> {
        let range = tensor.offset()..tensor.offset() + tensor.numel();
        Ok(View::Write(tensor.write(op)?, range))
    }

    fn elements(&self) -> &[T] {
        match self {
            View::Read(guard, range) => &guard[range.clone()],
            View::Write(guard, range) => &guard[range.clone()],
        }
    }
}

/// An output that is handed out in pieces, front to back, or only read.
enum Output<'a, T> {
    Absent,
    Read(&'a [T]),
    /// The elements that are left, and the position of the first.
    Write(&'a mut [T], usize),
}

impl<'a, T: Summand> Output<'a, T> {
    fn new(view: &'a mut Option<View<'_, T>>) -> Output<'a, T> {
        match view {
            None => Output::Absent,
            Some(View::Write(guard, range)) => Output::Write(&mut guard[range.clone()], 0),
            Some(view) => Output::Read(view.elements()),
        }
    }

    /// Elements that no piece had yet; those before them are given up.
    fn take(&mut self, start: usize, length: usize) -> &'a mut [T] {
        let Output::Write(rest, at) = self else { return &mut [] };
        let (_, from_start) = std::mem::take(rest).split_at_mut(start - *at);
        let (piece, left) = from_start.split_at_mut(length);
        (*rest, *at) = (left, start + length);
        piece
    }
}

/// The sources of a piece.
enum PieceSource<'a, T> {
    Slice(&'a [T]),
    /// One of the destinations.
    Dest(usize),
}

/// A part of a transfer.
struct Piece<'a, T> {
    sources: Vec<PieceSource<'a, T>>,
    dests: Vec<&'a mut [T]>,
}

/// The transfers in pieces that threads can share.
fn cut<'a, T: Summand>(
    plan: &[Transfer],
    inputs: &'a [Option<View<'_, T>>],
    outputs: &mut [Output<'a, T>],
) -> Vec<Mutex<Piece<'a, T>>> {
    let step = PIECE_BYTES / size_of::<T>();
    let mut pieces = Vec::new();
    for Transfer { sources, dests, .. } in plan {
        let total = dests[0].range.len();
        for start in (0..total).step_by(step) {
            let length = step.min(total - start);
            let piece = |place: &Segment| place.range.start + start..place.range.start + start + length;
            let source = |place: &Segment| match (place.side, &outputs[place.rank]) {
                (Side::Input, _) => PieceSource::Slice(
                    inputs[place.rank].as_ref().map_or(&[][..], |view| &view.elements()[piece(place)]),
                ),
                (Side::Output, Output::Read(elements)) => PieceSource::Slice(&elements[piece(place)]),
                // By the plan a destination of this transfer.
                _ => PieceSource::Dest(dests.iter().position(|d| d.rank == place.rank).unwrap_or(0)),
            };
            let sources = sources.iter().map(source).collect();
            let dests = dests.iter().map(|d| outputs[d.rank].take(piece(d).start, length)).collect();
            pieces.push(Mutex::new(Piece { sources, dests }));
        }
    }
    pieces
}

impl<T: Summand> Piece<'_, T> {
    fn run(&mut self, by: Option<Reduction>) {
        let Piece { sources, dests } = self;
        match (by, &sources[..]) {
            (Some(by), [_, _, ..]) => reduce(sources, dests, by),
            (_, [PieceSource::Slice(from), ..]) => dests.iter_mut().for_each(|to| to.copy_from_slice(from)),
            (_, &[PieceSource::Dest(i), ..]) => {
                let from = std::mem::take(&mut dests[i]);
                dests.iter_mut().filter(|to| !to.is_empty()).for_each(|to| to.copy_from_slice(from));
            }
            (_, []) => {}
        }
    }
}

fn reduce<T: Summand>(sources: &[PieceSource<'_, T>], dests: &mut [&mut [T]], by: Reduction) {
    let mut block = Block::default();
    for start in (0..dests[0].len()).step_by(BLOCK) {
        let range = start..dests[0].len().min(start + BLOCK);
        for (i, source) in sources.iter().enumerate() {
            let elements = match *source {
                PieceSource::Slice(elements) => &elements[range.clone()],
                PieceSource::Dest(d) => &dests[d][range.clone()],
            };
            block.take(elements, i == 0, by);
        }
        block.finish(by, sources.len());
        dests.iter_mut().for_each(|to| block.store(&mut to[range.clone()]));
    }
}
