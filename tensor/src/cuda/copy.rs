//! Copies of tensors to, from, between and on GPUs. [`Readback`]: numbers that are read late.
//!
//! A view is made contiguous by a kernel (`copy.cu`). It moves elements that lie together in words as large as the layout allows. If the
//! innermost dimension's elements lie apart and another dimension's lie together, it transposes square tiles in shared memory.
#![allow(unsafe_code)]

use super::{Args, Gpu, GpuEvent, Grid, Program, Scratch};
use crate::{DType, Device, Dims, Error, Loops, Result, Tensor};

/// Copies `from`'s elements into the contiguous `to`, of one shape and dtype; at least one of them is on a GPU.
pub(crate) fn copy_strided(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let (source, target) = (from.device(), to.device());
    match (source.is_cuda(), target.is_cuda()) {
        (true, true) if source == target => within(op, to, from),
        _ if !from.is_contiguous() => copy_strided(op, to, &from.contiguous()?),
        (true, true) => between(op, to, from),
        (true, false) => to_host(op, to, from),
        (false, _) => from_host(op, to, from),
    }
}

/// Sets all bytes of a tensor that covers its storage.
pub(crate) fn zero(op: &'static str, to: &mut Tensor) -> Result<()> {
    let gpu = to.device().gpu()?;
    let bytes = to.numel() * to.dtype().size();
    if bytes == 0 {
        return Ok(());
    }
    let address = to.device_address();
    let _lock = to.lock_write(op)?;
    // SAFETY: the tensor's memory is as large, and is freed in the stream's order.
    unsafe { gpu.fill(op, address, 0, bytes) }.map_err(Error::of_gpu)
}

fn bytes_of(tensor: &Tensor) -> (usize, usize) {
    let size = tensor.dtype().size();
    (tensor.offset() * size, tensor.numel() * size)
}

fn from_host(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let gpu = to.device().gpu()?;
    let (start, len) = bytes_of(from);
    let source = from.read_bytes(op)?;
    let address = to.device_address();
    let _lock = to.lock_write(op)?;
    if from.storage().is_pinned() && !gpu.is_capturing() {
        let kept = from.hold(op)?;
        // SAFETY: the tensor's memory is as large, and is freed in the stream's order; the source stays until the stream has read it.
        unsafe { gpu.upload_pinned(op, address, &source[start..][..len]) }.map_err(Error::of_gpu)?;
        gpu.when_done(move |_| drop(kept));
        return Ok(());
    }
    // SAFETY: the tensor's memory is as large, and is freed in the stream's order.
    unsafe { gpu.upload(op, address, &source[start..][..len]) }.map_err(Error::of_gpu)
}

fn to_host(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let gpu = from.device().gpu()?;
    let (start, len) = bytes_of(to);
    {
        let _lock = from.lock_read(op)?;
        let mut target = to.write_bytes(op)?;
        // SAFETY: the tensor's memory is as large, and stays while it is locked.
        unsafe { gpu.download(op, &mut target[start..][..len], from.device_address()) }
            .map_err(Error::of_gpu)?;
    }
    gpu.check_faults().map_err(Error::of_gpu)
}

/// Between devices. The copy runs on the target's stream after the work that the source's stream has been given so far, and work that
/// the source's stream is given later waits for it.
fn between(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let (source, target) = (from.device().gpu()?, to.device().gpu()?);
    let (_, len) = bytes_of(from);
    {
        let (at, read_at) = (to.device_address(), from.device_address());
        // The guards first, which may make a stream wait for values.
        let _locks = (from.lock_read(op)?, to.lock_write(op)?);
        GpuEvent::record(source)?.order(target)?;
        // SAFETY: the memory exists: the source's stream waits below before it frees anything.
        unsafe { target.copy_from(op, at, (source, read_at), len) }.map_err(Error::of_gpu)?;
    }
    GpuEvent::record(target)?.order(source)
}

/// On one device.
fn within(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    if !from.is_contiguous() {
        return gather(op, to, from);
    }
    let gpu = to.device().gpu()?;
    let (_, len) = bytes_of(from);
    let (at, read_at) = (to.device_address(), from.device_address());
    let _locks = (from.lock_read(op)?, to.lock_write(op)?);
    // SAFETY: both tensors are as large, and are freed in the stream's order.
    unsafe { gpu.copy_from(op, at, (gpu, read_at), len) }.map_err(Error::of_gpu)
}

/// Dimensions that kernels take.
const RANK_MAX: usize = 8;

/// `copy.cu`'s structure of this name.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Words {
    rank: u64,
    sizes: [u64; RANK_MAX],
    from: [u64; RANK_MAX],
    to: [u64; RANK_MAX],
}

/// `copy.cu`'s `Plane`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Plane {
    near: u64,
    far: u64,
    from_stride: u64,
    to_stride: u64,
    tiles_near: u64,
    tiles_far: u64,
}

const COPY: Program<'static> =
    Program { name: "copy.cu", files: &[("copy.cu", include_str!("copy.cu"))], defines: &[] };

/// Copies `from`, which is not contiguous, into the contiguous `to` on the same device.
fn gather(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    if to.numel() == 0 {
        to.bump_version();
        return Ok(());
    }
    let loops = Loops::new(from.shape(), [from.strides()]);
    if loops.sizes().len() > RANK_MAX {
        return by_parts(op, to, from);
    }
    let (gpu, offset) = (to.device().gpu()?, to.offset());
    run(gpu, &loops, (Args::new(op, gpu).write(to)?, offset), from)
}

/// Copies its elements in row-major order into scratch memory.
pub(super) fn gather_into(op: &'static str, to: &Scratch, from: &Tensor) -> Result<()> {
    let (gpu, loops) = (from.device().gpu()?, Loops::new(from.shape(), [from.strides()]));
    if loops.sizes().len() > RANK_MAX {
        let got = format!("more dimensions that do not lie together, of shape {:?}", from.shape());
        return Err(Error::shape(op, got, format!("at most {RANK_MAX} on a GPU")));
    }
    if from.numel() == 0 {
        return Ok(());
    }
    run(gpu, &loops, (Args::new(op, gpu).scratch(to), 0), from)
}

/// `args` hold the target, whose first element is `to_offset` elements from an aligned address.
fn run<'a>(
    gpu: &'static Gpu,
    loops: &Loops<1>,
    (args, to_offset): (Args<'a>, usize),
    from: &'a Tensor,
) -> Result<()> {
    match transposed_dimension(loops) {
        Some(near) => transpose(gpu, loops, near, (args, to_offset), from),
        None => copy(gpu, loops, (args, to_offset), from),
    }
}

/// Elements along both dimensions of a plane from which on it is transposed.
const SIDE_MIN: usize = 8;

/// The dimension that lies together in the source, if it is not the innermost and the plane of both is large enough.
fn transposed_dimension(loops: &Loops<1>) -> Option<usize> {
    let (sizes, strides) = (loops.sizes(), loops.strides());
    let inner = sizes.len() - 1;
    let near = (0..inner).find(|&d| strides[d] == [1] && sizes[d] >= SIDE_MIN)?;
    (strides[inner] != [0] && sizes[inner] >= SIDE_MIN).then_some(near)
}

fn copy<'a>(
    gpu: &'static Gpu,
    loops: &Loops<1>,
    (args, to_offset): (Args<'a>, usize),
    from: &'a Tensor,
) -> Result<()> {
    let (size, inner) = (from.dtype().size(), loops.sizes().len() - 1);
    let word = word_bytes(loops, from, to_offset);
    let many = word / size;
    let mut words =
        Words { rank: inner as u64 + 1, sizes: [1; RANK_MAX], from: [0; RANK_MAX], to: [0; RANK_MAX] };
    for (d, (&count, &[stride])) in loops.sizes().iter().zip(loops.strides()).enumerate() {
        // Of the innermost dimension the words lie together, or they are elements.
        let (count, stride) = if d == inner { (count / many, stride) } else { (count, stride / many) };
        (words.sizes[d], words.from[d]) = (count as u64, stride as u64);
    }
    let entry = match word {
        1 => "copy_1",
        2 => "copy_2",
        4 => "copy_4",
        8 => "copy_8",
        _ => "copy_16",
    };
    let count = from.numel() / many;
    let args = args.read(from)?.value(words).value(count as u64);
    gpu.kernel(args.op(), &COPY, entry)?.launch(Grid::over(gpu, count, 256), args)
}

/// The largest word in which the elements can be moved.
fn word_bytes(loops: &Loops<1>, from: &Tensor, to_offset: usize) -> usize {
    let size = from.dtype().size();
    if loops.inner_strides() != [1] {
        return size;
    }
    let outer = &loops.strides()[..loops.sizes().len() - 1];
    let fits = |word: usize| {
        let whole = |elements: usize| (elements * size).is_multiple_of(word);
        whole(loops.inner()) && whole(from.offset()) && whole(to_offset) && outer.iter().all(|&[s]| whole(s))
    };
    [16, 8, 4, 2].into_iter().find(|&word| word > size && fits(word)).unwrap_or(size)
}

fn transpose<'a>(
    gpu: &'static Gpu,
    loops: &Loops<1>,
    near: usize,
    (args, to_offset): (Args<'a>, usize),
    from: &'a Tensor,
) -> Result<()> {
    let (sizes, strides, far) = (loops.sizes(), loops.strides(), loops.sizes().len() - 1);
    let to_stride = |d: usize| sizes[d + 1..].iter().product::<usize>();
    let mut outer = Words { rank: 0, sizes: [1; RANK_MAX], from: [0; RANK_MAX], to: [0; RANK_MAX] };
    for d in (0..far).filter(|&d| d != near) {
        let at = outer.rank as usize;
        (outer.sizes[at], outer.from[at]) = (sizes[d] as u64, strides[d][0] as u64);
        outer.to[at] = to_stride(d) as u64;
        outer.rank += 1;
    }
    let size = from.dtype().size();
    let by = |v: usize| {
        let lengths = [sizes[near], sizes[far], strides[far][0], from.offset(), to_offset];
        let batches = outer.from.iter().all(|s| s.is_multiple_of(v as u64));
        batches && lengths.iter().all(|length| length.is_multiple_of(v))
    };
    let (entry, many) = match size {
        1 if by(4) => ("transpose_1_by_4", 4),
        2 if by(2) => ("transpose_2_by_2", 2),
        1 => ("transpose_1", 1),
        2 => ("transpose_2", 1),
        4 => ("transpose_4", 1),
        _ => ("transpose_8", 1),
    };
    let tiles = |d: usize| sizes[d].div_ceil(32 * many);
    let plane = Plane {
        near: sizes[near] as u64,
        far: sizes[far] as u64,
        from_stride: strides[far][0] as u64,
        to_stride: to_stride(near) as u64,
        tiles_near: tiles(near) as u64,
        tiles_far: tiles(far) as u64,
    };
    let batches: u64 = outer.sizes.iter().product();
    let mut grid = Grid::new(tiles(near) * tiles(far) * batches as usize, 32);
    grid.threads[1] = 8;
    let args = args.read(from)?.value(plane).value(outer);
    gpu.kernel(args.op(), &COPY, entry)?.launch(grid, args)
}

/// Along the first dimension, for layouts of more dimensions than a kernel takes.
fn by_parts(op: &'static str, to: &mut Tensor, from: &Tensor) -> Result<()> {
    let part: Dims = from.shape()[1..].into();
    let numel: usize = part.iter().product();
    for i in 0..from.shape()[0] {
        let mut target = to.view_into(i * numel, &part)?;
        copy_strided(op, &mut target, &from.select(0, i)?)?;
    }
    Ok(())
}

/// Pinned memory for f64 numbers of a GPU, used again and again. [`Readback::start`] asks for numbers, and [`Readback::finish`] waits
/// for them. The device may be given more work in between.
#[derive(Debug)]
pub struct Readback {
    device: Device,
    bytes: phalanx_cuda::Readback,
    count: usize,
}

impl Readback {
    /// For `count` numbers of a CUDA device.
    ///
    /// # Errors
    /// If it is no such device, or the system has no more memory that can be pinned.
    pub fn new(device: Device, count: usize) -> Result<Readback> {
        let bytes =
            phalanx_cuda::Readback::new(device.gpu()?, count * size_of::<f64>()).map_err(Error::of_gpu)?;
        Ok(Readback { device, bytes, count })
    }

    /// Asks for a tensor's numbers as they will be when all work that the device was given so far is done. The tensor is f64, contiguous,
    /// and has as many elements as there is room for. Waits only for numbers that were asked for before and not taken.
    ///
    /// # Errors
    /// If the tensor is another, or the device is lost.
    pub fn start(&mut self, from: &Tensor) -> Result<()> {
        const OP: &str = "readback";
        self.bytes.wait().map_err(Error::of_gpu)?;
        let fits = from.numel() == self.count && from.is_contiguous();
        if from.device() != self.device || from.dtype() != DType::F64 || !fits {
            let got = format!("{:?} {} on {}", from.shape(), from.dtype(), from.device());
            let wanted = format!("{} contiguous f64 on {}", self.count, self.device);
            return Err(Error::shape(OP, got, wanted));
        }
        let _lock = from.lock_read(OP)?;
        // SAFETY: the tensor's memory is as large, and is freed in the stream's order.
        unsafe { self.bytes.start(OP, from.device_address()) }.map_err(Error::of_gpu)
    }

    /// Waits for the numbers that were asked for, and returns them.
    ///
    /// # Errors
    /// If none were asked for, or what kernels have reported before. The report is taken: later waits for the device do not return it
    /// again.
    pub fn finish(&mut self) -> Result<Vec<f64>> {
        let bytes = self.bytes.finish().map_err(Error::of_gpu)?;
        let bytes = bytes.ok_or_else(|| Error::invalid("readback", "nothing was asked for"))?;
        let number = |bytes: &[u8]| f64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        Ok(bytes.chunks_exact(size_of::<f64>()).map(number).collect())
    }
}
