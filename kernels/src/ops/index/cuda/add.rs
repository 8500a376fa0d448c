//! Launches of `add.cu`.

use phalanx_tensor::cuda::{Args, Gpu, Grid, Program, Scratch};
use phalanx_tensor::{DType, Error, Result, Tensor};

use super::super::summand::End;
use super::order::{Order, room};
use super::pick::{lanes, line};
use crate::cuda::{FAULT, File, LAYOUT, PRELUDE, Strided, type_name};

const FILES: &[File] = &[PRELUDE, LAYOUT, FAULT, ("add.cu", include_str!("add.cu"))];

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
        return if stores { crate::ops::full::fill_(out, 0) } else { Ok(()) };
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
    let (log_lanes, grid) = lanes(outer * rows, things);
    let (kind, padding, factor) = match what {
        Rows::Store { padding } => (0u32, padding.map_or(u64::MAX, |row| row as u64), 1.0),
        Rows::Add => (1, u64::MAX, 1.0),
        Rows::AddScaled(factor) => (2, u64::MAX, factor),
    };
    let args = Args::new(op, gpu).write(out)?.read(&source)?.scratch(&starts).scratch(&order.positions);
    let args = args.value(outer as u64).value(rows as u64).value(count as u64).value(inner as u64);
    let args = args.value(padding).value(log_lanes).value(kind).value(factor_of(dtype, factor));
    gpu.kernel(op, &program, entry)?.launch(grid, args)
}

fn program<'a>(defines: &'a [(&'a str, &'a str)]) -> Program<'a> {
    Program { name: "add.cu", files: FILES, defines }
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
