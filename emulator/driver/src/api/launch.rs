//! Modules, functions, launches, occupancy and tensor maps.

use std::ffi::c_char;
use std::fs;
use std::sync::Arc;

use phalanx_emulator_link::pointer::{Host, In, Out, Text};
use phalanx_ptx::{Fill, Launch, Swizzle, TensorMap, TensorType};

use crate::device::{
    CLUSTER_MAX, CLUSTER_MAX_OPTIN, SHARED_BYTES_MULTIPROCESSOR, SHARED_BYTES_RESERVED, WARP, multiprocessors,
};
use crate::launch::{Config, blocks_per_multiprocessor, cluster_of, launch};
use crate::module::{FUNCTIONS, Function, MODULES, image, load, unload};
use crate::settings::settings;
use crate::status::{Failure, Result, Status, kept, present};

fn max_active(blocks: Out<i32>, function: usize, threads: i32, shared_bytes: usize) -> Result<()> {
    let function = FUNCTIONS.get(function)?;
    let threads = u32::try_from(threads).ok().filter(|n| *n > 0);
    let threads = threads.ok_or_else(|| Status::INVALID_VALUE.because("blocks without threads"))?;
    let shared_bytes = u32::try_from(shared_bytes).unwrap_or(u32::MAX);
    set!(blocks, blocks_per_multiprocessor(&function, threads, shared_bytes) as i32)
}

/// Bytes of dynamic shared memory of a block with that many threads.
type SharedBytes = extern "C" fn(i32) -> usize;

fn potential(
    grid: Out<i32>,
    block: Out<i32>,
    function: usize,
    shared_of: Option<SharedBytes>,
    shared_bytes: usize,
    limit: i32,
) -> Result<()> {
    let function = FUNCTIONS.get(function)?;
    let most = u32::try_from(limit).ok().filter(|n| *n > 0).unwrap_or(1024).min(function.threads_max);
    let mut best = (0, 0, 0);
    for threads in (1..=most.div_ceil(WARP)).rev().map(|warps| (warps * WARP).min(most)) {
        let shared = shared_of.map_or(shared_bytes, |of| of(threads as i32));
        let blocks = blocks_per_multiprocessor(&function, threads, u32::try_from(shared).unwrap_or(u32::MAX));
        if blocks * threads > best.0 {
            best = (blocks * threads, blocks, threads);
        }
    }
    set!(grid, (best.1 * multiprocessors()) as i32)?;
    set!(block, best.2 as i32)
}

/// `CUtensorMap`, in a layout that only the interpreter knows, as only the GPU knows the real one.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Encoded([u8; 128]);

fn unknown(what: &str, number: i32) -> Failure {
    Status::INVALID_VALUE.because(format!("{what} {number} of a tensor map"))
}

fn named<T: Copy>(what: &str, number: i32, known: &[T]) -> Result<T> {
    usize::try_from(number).ok().and_then(|i| known.get(i)).copied().ok_or_else(|| unknown(what, number))
}

/// The types of `CUtensorMapDataType`. Those that flush denormals are the same here.
const TYPES: [TensorType; 13] = [
    TensorType::U8,
    TensorType::U16,
    TensorType::U32,
    TensorType::I32,
    TensorType::U64,
    TensorType::I64,
    TensorType::F16,
    TensorType::F32,
    TensorType::F64,
    TensorType::Bf16,
    TensorType::F32,
    TensorType::Tf32,
    TensorType::Tf32,
];
const SWIZZLES: [Swizzle; 4] = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
const FILLS: [Fill; 2] = [Fill::Zero, Fill::Nan];

export! {
    fn cuModuleLoadData(module: Out<usize>, at: Host) { set!(module, load(&image(at)?)?) }
    fn cuModuleLoadDataEx(module: Out<usize>, at: Host, count: u32, options: Host, values: Host) {
        set!(module, load(&image(at)?)?)
    }
    fn cuModuleLoadFatBinary(module: Out<usize>, at: Host) { set!(module, load(&[0x50, 0xed, 0x55, 0xba])?) }
    fn cuModuleLoad(module: Out<usize>, file: Text) {
        let file = present(file.string(), "file")?;
        let image = fs::read(&file).map_err(|error| Status::FILE_NOT_FOUND.because(format!("{file}: {error}")))?;
        set!(module, load(image.strip_suffix(&[0]).unwrap_or(&image))?)
    }
    fn cuModuleUnload(module: usize) { unload(module) }
    fn cuModuleGetLoadingMode(mode: Out<i32>) { set!(mode, 1) }
    fn cuModuleGetFunction(function: Out<usize>, module: usize, name: Text) {
        let found = MODULES.get(module)?;
        let name = present(name.string(), "name")?;
        set!(function, FUNCTIONS.add(Arc::new(Function::new(found, module, &name)?)))
    }
    fn cuModuleGetFunctionCount(count: Out<u32>, module: usize) {
        let loaded = MODULES.get(module)?.loaded()?;
        set!(count, loaded.module().kernels().count() as u32)
    }
    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, module: usize, name: Text) {
        let loaded = MODULES.get(module)?.loaded()?;
        let name = present(name.string(), "name")?;
        let found = loaded.variable(&name);
        let (start, size) = found.ok_or_else(|| Status::NOT_FOUND.because(format!("no variable {name:?}")))?;
        if !address.is_null() {
            set!(address, start)?;
        }
        if bytes.is_null() { Ok(()) } else { set!(bytes, size as usize) }
    }
    fn cuFuncGetAttribute(value: Out<i32>, attribute: i32, function: usize) {
        let function = FUNCTIONS.get(function)?;
        let unknown = || Status::INVALID_VALUE.because(format!("function attribute {attribute}"));
        set!(value, function.get(attribute).ok_or_else(unknown)?)
    }
    fn cuFuncSetAttribute(function: usize, attribute: i32, value: i32) {
        FUNCTIONS.get(function)?.set(attribute, value)
    }
    fn cuFuncSetCacheConfig(function: usize, config: i32) { Ok(FUNCTIONS.get(function).map(drop)?) }
    fn cuFuncGetModule(module: Out<usize>, function: usize) { set!(module, FUNCTIONS.get(function)?.module_handle) }
    fn cuFuncGetName(name: Out<*const c_char>, function: usize) {
        set!(name, kept(&FUNCTIONS.get(function)?.name))
    }
    fn cuFuncIsLoaded(state: Out<i32>, function: usize) {
        FUNCTIONS.get(function)?;
        set!(state, 1)
    }
    fn cuFuncLoad(function: usize) { Ok(FUNCTIONS.get(function).map(drop)?) }
    fn cuFuncGetParamCount(function: usize, count: Out<usize>) {
        set!(count, FUNCTIONS.get(function)?.parameters.len())
    }
    fn cuFuncGetParamInfo(function: usize, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        let function = FUNCTIONS.get(function)?;
        let found = function.parameters.get(index).ok_or(Status::INVALID_VALUE)?;
        set!(offset, function.offsets[index])?;
        if bytes.is_null() { Ok(()) } else { present(bytes.set(found.bytes as usize), "bytes") }
    }
    fn cuLaunchKernel(
        function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared_bytes: u32, stream: usize,
        pointers: In<usize>, extra: In<usize>,
    ) {
        let (grid, block, cluster) = ([gx, gy, gz], [bx, by, bz], cluster_of(function)?);
        launch(function, Launch { grid, block, shared_bytes, cluster }, stream, pointers, extra, false)
    }
    fn cuLaunchCooperativeKernel(
        function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared_bytes: u32, stream: usize,
        pointers: In<usize>,
    ) {
        let (grid, block) = ([gx, gy, gz], [bx, by, bz]);
        launch(function, Launch { grid, block, shared_bytes, cluster: [1; 3] }, stream, pointers, pointers, true)
    }
    fn cuLaunchKernelEx(config: In<Config>, function: usize, pointers: In<usize>, extra: In<usize>) {
        let config = present(config.get(), "config")?;
        let (cluster, cooperative) = config.cluster()?;
        let Config { grid, block, shared_bytes, stream, .. } = config;
        launch(function, Launch { grid, block, shared_bytes, cluster }, stream, pointers, extra, cooperative)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>, function: usize, threads: i32, shared_bytes: usize,
    ) {
        max_active(blocks, function, threads, shared_bytes)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<i32>, function: usize, threads: i32, shared_bytes: usize, flags: u32,
    ) {
        max_active(blocks, function, threads, shared_bytes)
    }
    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<i32>, block: Out<i32>, function: usize, shared_of: Option<SharedBytes>, shared_bytes: usize,
        limit: i32,
    ) {
        potential(grid, block, function, shared_of, shared_bytes, limit)
    }
    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<i32>, block: Out<i32>, function: usize, shared_of: Option<SharedBytes>, shared_bytes: usize,
        limit: i32, flags: u32,
    ) {
        potential(grid, block, function, shared_of, shared_bytes, limit)
    }
    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: Out<usize>, function: usize, blocks: i32, threads: i32) {
        let function = FUNCTIONS.get(function)?;
        let blocks = u32::try_from(blocks).ok().filter(|n| *n > 0).ok_or(Status::INVALID_VALUE)?;
        let each = SHARED_BYTES_MULTIPROCESSOR / blocks;
        set!(bytes, each.saturating_sub(SHARED_BYTES_RESERVED + function.shared_bytes) as usize)
    }
    fn cuOccupancyMaxPotentialClusterSize(size: Out<i32>, function: usize, config: In<Config>) {
        let function = FUNCTIONS.get(function)?;
        present(config.get(), "config")?;
        set!(size, if function.has_big_clusters() { CLUSTER_MAX_OPTIN } else { CLUSTER_MAX } as i32)
    }
    fn cuOccupancyMaxActiveClusters(clusters: Out<i32>, function: usize, config: In<Config>) {
        let function = FUNCTIONS.get(function)?;
        let config = present(config.get(), "config")?;
        let (cluster, _) = config.cluster()?;
        let threads: u32 = config.block.iter().product();
        let blocks = blocks_per_multiprocessor(&function, threads, config.shared_bytes) * multiprocessors();
        set!(clusters, (blocks / cluster.iter().product::<u32>().max(1)) as i32)
    }
    fn cuTensorMapEncodeTiled(
        map: Out<Encoded>, kind: i32, rank: u32, address: u64, sides: In<u64>, strides: In<u64>, window: In<u32>,
        steps: In<u32>, interleave: i32, swizzle: i32, promotion: i32, fill: i32,
    ) {
        if !(1..=5).contains(&rank) || sides.is_null() || window.is_null() || steps.is_null() {
            return Err(Status::INVALID_VALUE.because(format!("a tensor map of rank {rank}, or a null list")));
        }
        if settings().before_hopper {
            return Err(Status::NOT_SUPPORTED.because("devices of compute capability 8.0 have no tensor maps"));
        }
        if interleave != 0 {
            return Err(Status::NOT_SUPPORTED.because("interleaved tensor maps are not emulated"));
        }
        let rank = rank as usize;
        let tensor = TensorMap {
            kind: named("data type", kind, &TYPES)?,
            address,
            sides: sides.list(rank),
            strides: strides.list(rank - 1),
            window: window.list(rank),
            steps: steps.list(rank),
            swizzle: named("swizzle", swizzle, &SWIZZLES)?,
            fill: named("fill", fill, &FILLS)?,
        };
        let bytes = tensor.encode().map_err(|error| Status::INVALID_VALUE.because(error.to_string()))?;
        set!(map, Encoded(bytes))
    }
}
