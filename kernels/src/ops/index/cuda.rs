//! Picking and adding by index on a GPU: launches of `pick.cu`, of `order.cu`, which sorts positions by the index that
//! they hold, and of `add.cu`, which adds in that order.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Program, Scratch, Traffic};
use phalanx_tensor::{DType, Dims, Error, Result, Tensor};

use super::summand::End;
use crate::cuda::{FAULT, File, LAYOUT, PRELUDE, Strided, type_name};

const ADD: &[File] = &[PRELUDE, LAYOUT, FAULT, ("add.cu", include_str!("add.cu"))];

const THREADS: u32 = 256;
/// Lines from which a thread each keeps the device busy, however long they are.
const LINES_MIN: usize = 8192;
/// Elements that a thread adds one after the other, however few lines there are.
const LINE_MAX: usize = 32;

/// What is done with the sum of the rows that name a row.
#[derive(Clone, Copy)]
pub(in crate::ops::index) enum Rows {
    /// Stored; 0 for a row that nothing names, and for this one.
    Store { padding: Option<usize> },
    /// Rounded and added to what is there.
    Add,
    /// Multiplied and added to what is there.
    AddScaled(f64),
}

impl Rows {
    /// What a CPU does at the end, and the row that becomes 0.
    pub(in crate::ops::index) fn end(self) -> (End, Option<usize>) {
        match self {
            Rows::Store { padding } => (End::Store, padding),
            Rows::Add => (End::Add, None),
            Rows::AddScaled(factor) => (End::AddScaled(factor), None),
        }
    }
}

/// How `add.cu` is told that.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Factor {
    real: f64,
    whole: i64,
}

/// Adds the rows of `source`, seen as `[outer, positions, inner]`, to those of the contiguous `out`, `[outer, rows, inner]`,
/// that the index (i64, contiguous) names for their positions.
pub(in crate::ops::index) fn add_rows(
    op: &'static str,
    index: &Tensor,
    source: &Tensor,
    [rows, inner]: [usize; 2],
    out: &mut Tensor,
    what: Rows,
) -> Result<()> {
    if let Rows::Store { padding: Some(row) } = what
        && row >= rows
    {
        out.narrow(0, row, 1)?;
    }
    let (gpu, count) = (out.device().gpu()?, index.numel());
    let (dtype, source) = (out.dtype(), source.contiguous()?);
    if count == 0 || out.numel() == 0 {
        // Indices count even where there is nothing to add.
        let stores = matches!(what, Rows::Store { .. }) && out.numel() > 0;
        let any = [("ELEMENT", type_name(dtype))];
        if count > 0 {
            let keys = room(op, gpu, count)?;
            row_keys(op, gpu, &program(&any), &keys, index, rows)?;
        }
        return if stores { crate::ops::creation::fill_(out, 0) } else { Ok(()) };
    }
    if u32::try_from(rows).is_err() {
        return Err(Error::invalid(op, format!("{rows} rows; a GPU takes less than 2^32")));
    }
    let defines = [("ELEMENT", type_name(dtype))];
    let program = program(&defines);
    let keys = room(op, gpu, count)?;
    row_keys(op, gpu, &program, &keys, index, rows)?;
    let order = Order::new(op, gpu, keys, count, rows)?;
    let starts = room(op, gpu, rows + 1)?;
    let args = Args::new(op, gpu).scratch(&starts).scratch(&order.keys);
    let args = args.value(count as u32).value(rows as u32);
    let grid = Grid::new((rows + 1).div_ceil(THREADS as usize), THREADS);
    gpu.kernel(op, &program, "row_starts")?.launch(grid, args)?;

    let outer = out.numel() / (rows * inner);
    let packet = 16 / dtype.size();
    let packed = [inner, out.offset(), source.offset()].iter().all(|n| n.is_multiple_of(packet));
    let (entry, things) = if packed { ("rows_packed", inner / packet) } else { ("rows_single", inner) };
    let (log_lanes, grid) = lanes(outer * rows, things, 1);
    let (kind, padding, factor) = match what {
        Rows::Store { padding } => (0u32, padding.map_or(u64::MAX, |row| row as u64), 1.0),
        Rows::Add => (1, u64::MAX, 1.0),
        Rows::AddScaled(factor) => (2, u64::MAX, factor),
    };
    let args = Args::new(op, gpu).write(out)?.read(&source)?.scratch(&starts).scratch(&order.positions);
    let args = args.value(outer as u64).value(rows as u64).value(count as u64).value(inner as u64);
    let args = args.value(padding).value(log_lanes).value(kind).value(factor_of(dtype, factor));
    let args = if matches!(what, Rows::Store { .. }) { args } else { args.reading_outputs() };
    gpu.kernel(op, &program, entry)?.launch(grid, args)
}

fn program<'a>(defines: &'a [(&'a str, &'a str)]) -> Program<'a> {
    Program { name: "add.cu", files: ADD, defines }
}

fn row_keys(
    op: &'static str,
    gpu: &'static Gpu,
    program: &Program<'_>,
    keys: &Scratch,
    index: &Tensor,
    rows: usize,
) -> Result<()> {
    let count = index.numel();
    let args =
        Args::new(op, gpu).scratch(keys).read(index)?.value(count as u64).value(rows as u64).faults()?;
    gpu.kernel(op, program, "row_keys")?.launch(Grid::over(gpu, count, THREADS), args)
}

/// The factor as the CPU rounds it for sums of integers.
fn factor_of(dtype: DType, factor: f64) -> Factor {
    let whole = if dtype == DType::I32 { i64::from(factor as i32) } else { factor as i64 };
    Factor { real: factor, whole }
}

/// Adds `source[.., i, ..]` to `out[.., index[.., i, ..], ..]` along `dim`; `out` and the index (i64) are contiguous.
pub(in crate::ops::index) fn add_elements(
    op: &'static str,
    dim: usize,
    index: &Tensor,
    source: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    if index.numel() == 0 {
        return Ok(());
    }
    if out.rank() == 0 {
        let (index, source) = (index.unsqueeze(0)?, source.unsqueeze(0)?);
        return add_elements(op, 0, &index, &source, &mut out.unsqueeze(0)?);
    }
    let (length, source) = (index.shape()[dim], source.contiguous()?);
    let lines = index.numel() / length;
    let enough = out.dtype().size() != 2 && (lines >= LINES_MIN || length <= LINE_MAX);
    if length == 1 || enough || u32::try_from(out.numel()).is_err() {
        return add_lines(op, dim, index, &source, out);
    }
    let (gpu, count, places) = (out.device().gpu()?, index.numel(), out.numel());
    let defines = [("ELEMENT", type_name(out.dtype()))];
    let program = program(&defines);
    let (first, along, size) = line(op, out, dim, index.shape())?;
    let keys = room(op, gpu, count)?;
    let args = Args::new(op, gpu).scratch(&keys).read(index)?;
    let args = args.value(Strided::new(op, index.shape(), [&first])?).value(along as u64);
    let args = args.value(size as u64).value(places as u64).value(count as u64).faults()?;
    gpu.kernel(op, &program, "place_keys")?.launch(Grid::over(gpu, count, THREADS), args)?;
    drop(first);
    add_by_key(op, gpu, &program, keys, &source, out)
}

/// Adds each element of the contiguous source to the one of `out` that its key names.
fn add_by_key(
    op: &'static str,
    gpu: &'static Gpu,
    program: &Program<'_>,
    keys: Scratch,
    source: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let (count, places) = (source.numel(), out.numel());
    let order = Order::new(op, gpu, keys, count, places)?;
    let args = Args::new(op, gpu).write(out)?.read(source)?.scratch(&order.keys).scratch(&order.positions);
    let args = args.value(places as u64).value(count as u64);
    gpu.kernel(op, program, "add_elements")?.launch(Grid::over(gpu, count, THREADS), args)
}

/// [`add_elements`] by a thread for each line along `dim`.
fn add_lines(op: &'static str, dim: usize, index: &Tensor, source: &Tensor, out: &mut Tensor) -> Result<()> {
    let (gpu, length) = (out.device().gpu()?, index.shape()[dim]);
    if out.dtype().size() == 2 && length > 1 {
        return Err(Error::invalid(op, format!("{} elements; a GPU takes less than 2^32", out.numel())));
    }
    let (first, along, size) = line(op, out, dim, index.shape())?;
    let (first, lines) = (first.select(dim, 0)?, index.select(dim, 0)?);
    let layout = Strided::new(op, lines.shape(), [&first, &lines])?;
    let step = index.strides()[dim];
    drop(first);
    let defines = [("ELEMENT", type_name(out.dtype()))];
    let args = Args::new(op, gpu).write(out)?.read(source)?.read(index)?.value(layout);
    let args = args.value(lines.numel() as u64).value(length as u64).value(step as u64);
    let args = args.value(size as u64).value(along as u64).faults()?;
    let grid = Grid::over(gpu, lines.numel(), THREADS);
    gpu.kernel(op, &program(&defines), "add_lines")?.launch(grid, args)
}

/// Adds each element of `source` to the place (i32) in its plane of `out` that it names, if there is such a one. Places and
/// source are contiguous, with `outputs` elements for each of `out`'s planes of `plane` elements.
pub(in crate::ops) fn add_to_planes(
    op: &'static str,
    places: &Tensor,
    source: &Tensor,
    [outputs, plane]: [usize; 2],
    out: &mut Tensor,
) -> Result<()> {
    let (gpu, count, all) = (out.device().gpu()?, source.numel(), out.numel());
    if u32::try_from(all).is_err() {
        return Err(Error::invalid(op, format!("{all} pixels; a GPU takes less than 2^32")));
    }
    let defines = [("ELEMENT", type_name(out.dtype()))];
    let program = program(&defines);
    let keys = room(op, gpu, count)?;
    let args = Args::new(op, gpu).scratch(&keys).read(places)?.value(plane as u64);
    let args = args.value(outputs as u64).value(all as u64).value(count as u64);
    gpu.kernel(op, &program, "plane_keys")?.launch(Grid::over(gpu, count, THREADS), args)?;
    add_by_key(op, gpu, &program, keys, source, out)
}

const ORDER: &[File] = &[PRELUDE, ("order.cu", include_str!("order.cu"))];
const ORDERING: Program<'static> = Program { name: "order.cu", files: ORDER, defines: &[] };

/// Values of a digit, as in `order.cu`; so many threads has a block, too.
const DIGITS: usize = 256;
/// Keys of a tile and tiles of a block.
const TILE: usize = 1024;
const WARPS: usize = 8;

/// Keys, ascending, and the position that each had: u32 both.
struct Order {
    keys: Scratch,
    positions: Scratch,
}

/// Room for `count` keys.
///
/// # Errors
/// If they are too many for 32 bits, or there is no more memory.
fn room(op: &'static str, gpu: &'static Gpu, count: usize) -> Result<Scratch> {
    if u32::try_from(count).is_err() {
        return Err(Error::invalid(op, format!("{count} indices; a GPU takes less than 2^32")));
    }
    gpu.scratch(op, count * size_of::<u32>())
}

impl Order {
    /// Of `count` keys, none of which exceeds `largest`.
    fn new(
        op: &'static str,
        gpu: &'static Gpu,
        mut keys: Scratch,
        count: usize,
        largest: usize,
    ) -> Result<Order> {
        let tiles = count.div_ceil(TILE);
        let counts = gpu.scratch(op, DIGITS * tiles * size_of::<u32>())?;
        let totals = gpu.scratch(op, DIGITS * size_of::<u32>())?;
        let grid = Grid::new(tiles.div_ceil(WARPS), (32 * WARPS) as u32);
        let (n, tiles) = (count as u32, tiles as u32);
        let mut positions: Option<Scratch> = None;
        let bits = usize::BITS - largest.leading_zeros();
        for shift in (0..bits.max(1)).step_by(8) {
            let args = Args::new(op, gpu).scratch(&counts).scratch(&keys).value(n).value(shift).value(tiles);
            gpu.kernel(op, &ORDERING, "count_digits")?.launch(grid, args)?;
            let args = Args::new(op, gpu).scratch(&counts).scratch(&totals).value(tiles);
            gpu.kernel(op, &ORDERING, "scan_digits")?.launch(Grid::new(DIGITS, DIGITS as u32), args)?;
            let (next_keys, next) = (room(op, gpu, count)?, room(op, gpu, count)?);
            let args = Args::new(op, gpu).scratch(&next_keys).scratch(&next).scratch(&keys);
            let args = match &positions {
                Some(positions) => args.scratch(positions),
                None => args.value(0u64),
            };
            let args = args.scratch(&counts).scratch(&totals).value(n).value(shift).value(tiles);
            gpu.kernel(op, &ORDERING, "place")?.launch(grid, args)?;
            (keys, positions) = (next_keys, Some(next));
        }
        let positions = positions.ok_or_else(|| Error::invalid(op, "keys of no bits"))?;
        Ok(Order { keys, positions })
    }
}

const PICK: &[File] = &[PRELUDE, LAYOUT, FAULT, ("pick.cu", include_str!("pick.cu"))];
const PICKING: Program<'static> = Program { name: "pick.cu", files: PICK, defines: &[] };

/// The rows of `x` along `dim` that the index (i64, contiguous) names, into the contiguous `out`; `x` is contiguous.
pub(in crate::ops::index) fn rows(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    index: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let gpu = x.device().gpu()?;
    let size = x.dtype().size();
    let (outer, row): (usize, usize) =
        (x.shape()[..dim].iter().product(), x.shape()[dim + 1..].iter().product());
    let (count, bytes) = (index.numel(), row * size);
    if out.numel() == 0 {
        return Ok(());
    }
    let places = bytes | (x.offset() * size) | (out.offset() * size);
    let width = 1 << places.trailing_zeros().min(4);
    let entry = match width {
        1 => "rows_1",
        2 => "rows_2",
        4 => "rows_4",
        8 => "rows_8",
        _ => "rows_16",
    };
    let inner = bytes / width;
    let (log_lanes, grid) = lanes(outer * count, inner, 8);
    let args = Args::new(op, gpu).write(out)?.read(x)?.read(index)?;
    let args = args.value(outer as u64).value(count as u64).value(x.shape()[dim] as u64);
    let args = picked(args.value(inner as u64).value(log_lanes).faults()?, index);
    gpu.kernel(op, &PICKING, entry)?.launch(grid, args)
}

/// Of the table as much is read as is picked, and the index.
fn picked<'a>(args: Args<'a>, index: &Tensor) -> Args<'a> {
    let index_bytes = (index.numel() * index.dtype().size()) as u64;
    args.with_traffic(|t| Traffic { read: t.written + index_bytes, ..t })
}

/// How rows of `inner` things are shared out: the logarithm of the lanes that take a row, and the grid. Long rows are cut
/// into pieces of `each` things a lane along y.
fn lanes(rows: usize, inner: usize, each: usize) -> (u32, Grid) {
    let lanes = match inner {
        0..32 => inner.next_power_of_two(),
        32..1024 => 32,
        _ => THREADS as usize,
    };
    let pieces = inner.div_ceil(each * lanes).min(usize::from(u16::MAX));
    let grid = Grid::new((rows * lanes).div_ceil(THREADS as usize), THREADS).by(pieces, 1);
    (lanes.trailing_zeros(), grid)
}

/// `out[.., i, ..] = x[.., index[.., i, ..], ..]` along `dim`; index (i64) and `out` are contiguous.
pub(in crate::ops::index) fn elements(
    op: &'static str,
    x: &Tensor,
    dim: usize,
    index: &Tensor,
    out: &mut Tensor,
) -> Result<()> {
    let gpu: &Gpu = x.device().gpu()?;
    let numel = out.numel();
    if numel == 0 {
        return Ok(());
    }
    let (line, along, size) = line(op, x, dim, index.shape())?;
    let layout = Strided::new(op, index.shape(), [&line])?;
    let entry = match x.dtype().size() {
        1 => "elements_1",
        2 => "elements_2",
        4 => "elements_4",
        _ => "elements_8",
    };
    let args = Args::new(op, x.device().gpu()?).write(out)?.read(x)?.read(index)?.value(layout);
    let args = picked(args.value(along as u64).value(size as u64).value(numel as u64).faults()?, index);
    x.device().gpu()?.kernel(op, &PICKING, entry)?.launch(Grid::over(gpu, numel, THREADS), args)
}

/// What an index of this shape picks from, where every index is 0: of size 1 along `dim`; with the stride and the size
/// that `x` has there.
fn line(op: &'static str, x: &Tensor, dim: usize, index: &[usize]) -> Result<(Tensor, usize, usize)> {
    let Some((&size, &along)) = x.shape().get(dim).zip(x.strides().get(dim)) else {
        return Ok((x.clone(), 0, 1));
    };
    if size == 0 {
        return Err(Error::range(op, "an index", "none into a dimension of size 0"));
    }
    let sizes: Dims = index.iter().enumerate().map(|(d, &n)| if d == dim { 1 } else { n }).collect();
    let line = sizes.iter().enumerate().try_fold(x.clone(), |line, (d, &n)| line.narrow(d, 0, n))?;
    Ok((line, along, size))
}
