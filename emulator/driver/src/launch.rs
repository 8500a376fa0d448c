//! Launching kernels: what the driver refuses at once, what is queued, and how many blocks a multiprocessor holds.

use std::sync::Arc;

use phalanx_emulator_link::pointer::{In, read_checked};
use phalanx_ptx::{Launch, Loaded, Memory, Touched};

use crate::context::{Context, here};
use crate::counting;
use crate::device::{
    BLOCK_MAX, CLUSTER_MAX, CLUSTER_MAX_OPTIN, GRID_MAX, SHARED_BYTES_OPTIN, multiprocessors,
};
use crate::log::{self, Work};
use crate::module::{FUNCTIONS, Function};
use crate::queue::{Progress, Task};
use crate::race::Access;
use crate::settings::settings;
use crate::status::{Result, Status, failure};
use crate::streams::submit;

/// `CU_LAUNCH_PARAM_END`, `_BUFFER_POINTER` and `_BUFFER_SIZE`.
const EXTRA_END: usize = 0;
const EXTRA_BUFFER: usize = 1;
const EXTRA_SIZE: usize = 2;

fn refuse<T>(status: Status, function: &Function, why: String) -> Result<T> {
    Err(status.because(format!("the launch of {:?} is refused: {why}", function.name)))
}

/// What a device of this kind refuses before anything runs.
fn check(function: &Function, launch: &Launch) -> Result<()> {
    let Launch { grid, block, shared_bytes, cluster } = launch;
    let wrong = |why| refuse(Status::INVALID_VALUE, function, why);
    if (0..3).any(|i| grid[i] == 0 || grid[i] > GRID_MAX[i]) {
        return wrong(format!("a grid of {grid:?} blocks (1 to {GRID_MAX:?})"));
    }
    if (0..3).any(|i| block[i] == 0 || block[i] > BLOCK_MAX[i]) {
        return wrong(format!("blocks of {block:?} threads (1 to {BLOCK_MAX:?})"));
    }
    let threads: u64 = block.iter().map(|&n| u64::from(n)).product();
    if threads > u64::from(function.threads_max) {
        // As on hardware: more than any block may have is an invalid argument, more than this kernel's is not.
        let status = if threads > 1024 { Status::INVALID_VALUE } else { Status::LAUNCH_OUT_OF_RESOURCES };
        let why = format!("blocks of {threads} threads, but it has {} at most", function.threads_max);
        return refuse(status, function, why);
    }
    let most = function.dynamic_shared_bytes();
    if *shared_bytes > most {
        return wrong(format!(
            "{shared_bytes} bytes of dynamic shared memory, but {most} are allowed; more, up to {} in all, have to be \
             asked for with CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
            SHARED_BYTES_OPTIN
        ));
    }
    check_cluster(function, *grid, *cluster)
}

fn check_cluster(function: &Function, grid: [u32; 3], cluster: [u32; 3]) -> Result<()> {
    let blocks: u32 = cluster.iter().product();
    let required = function.cluster();
    if required != [0; 3] && required != cluster {
        let why = format!("clusters of {cluster:?} blocks, but its attributes say {required:?}");
        return refuse(Status::INVALID_CLUSTER_SIZE, function, why);
    }
    let most = if function.has_big_clusters() { CLUSTER_MAX_OPTIN } else { CLUSTER_MAX };
    if blocks > most {
        let why = format!("clusters of {blocks} blocks, but {most} are allowed");
        return refuse(Status::INVALID_CLUSTER_SIZE, function, why);
    }
    if (0..3).any(|i| cluster[i] == 0 || !grid[i].is_multiple_of(cluster[i])) {
        let why = format!("clusters of {cluster:?} blocks do not fill a grid of {grid:?}");
        return refuse(Status::INVALID_CLUSTER_SIZE, function, why);
    }
    Ok(())
}

/// The bytes of the parameters: from a pointer to each, or from one buffer in `extra`.
///
/// The caller says neither how many pointers there are nor what they point to. So no more is read than the kernel has
/// parameters, and an address that is not memory of the process is an error. A list that is too short often ends in such an address.
fn parameters(function: &Function, pointers: In<usize>, extra: In<usize>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; function.parameter_bytes];
    if function.parameters.is_empty() {
        return Ok(bytes);
    }
    if pointers.is_null() {
        return buffer(function, extra);
    }
    for (i, parameter) in function.parameters.iter().enumerate() {
        let (start, end) = (parameter.offset as usize, (parameter.offset + parameter.bytes) as usize);
        let at = word(pointers, i);
        if !at.is_some_and(|at| read_checked(at, &mut bytes[start..end])) {
            let found = match at {
                Some(0) => "is null".into(),
                Some(at) => format!("is {at:#x}, where the process has no {} bytes", parameter.bytes),
                None => "is not there".into(),
            };
            let wanted = function.parameters.len();
            let why = format!("the pointer to parameter {i} {found}; it has {wanted} parameters");
            return refuse(Status::INVALID_VALUE, function, why);
        }
    }
    Ok(bytes)
}

/// Element `i` of a list whose length the caller did not say, if it is memory of the process.
fn word(list: In<usize>, i: usize) -> Option<usize> {
    let mut bytes = [0; size_of::<usize>()];
    let at = list.address().checked_add(i * size_of::<usize>())?;
    read_checked(at, &mut bytes).then(|| usize::from_le_bytes(bytes))
}

fn buffer(function: &Function, extra: In<usize>) -> Result<Vec<u8>> {
    let wrong = |why: String| refuse(Status::INVALID_VALUE, function, why);
    let (mut at, mut size) = (0, None);
    // Each entry has a name and a value.
    for i in (0..).step_by(2) {
        let value = word(extra, i + 1);
        match word(extra, i).unwrap_or(EXTRA_END) {
            EXTRA_BUFFER => at = value.unwrap_or(0),
            EXTRA_SIZE => {
                let mut bytes = [0; size_of::<usize>()];
                size = value.filter(|at| read_checked(*at, &mut bytes)).map(|_| usize::from_le_bytes(bytes));
            }
            EXTRA_END => break,
            other => return wrong(format!("extra parameter {other:#x}")),
        }
    }
    let mut bytes = vec![0; function.offsets_end];
    match size {
        None => wrong("neither pointers to its parameters nor a buffer with them and its size".into()),
        Some(size) if size != bytes.len() => {
            wrong(format!("{size} bytes of parameters, but it has {}", bytes.len()))
        }
        Some(_) if !read_checked(at, &mut bytes) => wrong(format!("no buffer of parameters at {at:#x}")),
        Some(_) => Ok(as_in_c(function, &bytes)),
    }
}

/// Parameters that lie as on the device, as the interpreter has them.
fn as_in_c(function: &Function, bytes: &[u8]) -> Vec<u8> {
    let mut result = vec![0; function.parameter_bytes];
    for (parameter, &from) in function.parameters.iter().zip(&function.offsets) {
        let (to, size) = (parameter.offset as usize, parameter.bytes as usize);
        result[to..to + size].copy_from_slice(&bytes[from..from + size]);
    }
    result
}

/// Launches a kernel: checks now, runs in stream order.
pub(crate) fn launch(
    function: usize,
    shape: Launch,
    stream: usize,
    pointers: In<usize>,
    extra: In<usize>,
    cooperative: bool,
) -> Result<()> {
    let noted = log::noted("kernel");
    let function = FUNCTIONS.get(function)?;
    check(&function, &shape)?;
    if cooperative {
        check_cooperative(&function, &shape)?;
    }
    let bytes = parameters(&function, pointers, extra)?;
    let (context, loaded) = (here()?, function.loaded()?);
    if context.ordinal != function.module.context.ordinal {
        return refuse(Status::INVALID_HANDLE, &function, "its module is loaded on another device".into());
    }
    let Launch { grid, block, shared_bytes, .. } = shape;
    let work = Work { name: function.name.clone(), grid, block, shared_bytes, ..noted };
    let task = match settings().dry {
        true => Task::marker(&format!("kernel {:?}", function.name), &context),
        false => task(function, loaded, context, shape, bytes, cooperative),
    };
    submit(stream, task.with_work(work)).map(|_| ())
}

fn task(
    function: Arc<Function>,
    loaded: Arc<Loaded>,
    context: Arc<Context>,
    shape: Launch,
    parameters: Vec<u8>,
    cooperative: bool,
) -> Task {
    let what = format!("kernel {:?}", function.name);
    let runs_in = context.clone();
    let run = move |_| {
        let devices = runs_in.reachable();
        let memory: Vec<&Memory> = devices.iter().map(|device| &device.memory).collect();
        let start = if cooperative { phalanx_ptx::launch_cooperative } else { phalanx_ptx::launch };
        match start(&loaded, &function.name, &memory, &shape, &parameters, &settings().checks()) {
            Ok(report) => {
                counting::add(&loaded, &function.name, &report.counters);
                print!("{}", report.output);
                let access = |t: &Touched| Access { start: t.start, end: t.end, written: t.written };
                Progress::Done(report.touched.iter().map(access).collect())
            }
            Err(fault) => Progress::Failed(failure(&fault)),
        }
    };
    Task::new(what, &context, run)
}

/// All blocks of a cooperative launch have to be on the device at once.
fn check_cooperative(function: &Function, shape: &Launch) -> Result<()> {
    let threads: u32 = shape.block.iter().product();
    let room = blocks_per_multiprocessor(function, threads, shape.shared_bytes) * multiprocessors();
    let blocks: u64 = shape.grid.iter().map(|&n| u64::from(n)).product();
    if blocks > u64::from(room) {
        let why = format!("{blocks} blocks of a cooperative launch, but the device holds {room}");
        return refuse(Status::COOPERATIVE_LAUNCH_TOO_LARGE, function, why);
    }
    Ok(())
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Config {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub stream: usize,
    attributes: In<Attribute>,
    count: u32,
}

/// `CUlaunchAttribute`: the value's meaning depends on the number.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attribute {
    number: i32,
    padding: [u8; 4],
    value: [u32; 16],
}

impl Config {
    /// The clusters and whether the launch is cooperative. Attributes that only hint are left out of account.
    pub(crate) fn cluster(&self) -> Result<([u32; 3], bool)> {
        let (mut cluster, mut cooperative) = ([1; 3], false);
        for attribute in self.attributes.list(self.count as usize) {
            match attribute.number {
                2 => cooperative = attribute.value[0] != 0,
                4 => cluster = [attribute.value[0], attribute.value[1], attribute.value[2]],
                7 | 12 | 13 => {
                    let why = format!("launch attribute {} is not emulated", attribute.number);
                    return Err(Status::NOT_SUPPORTED.because(why));
                }
                _ => {}
            }
        }
        Ok((cluster, cooperative))
    }
}

/// The cluster of a launch that names none: the one that the function's attributes ask for.
pub(crate) fn cluster_of(function: usize) -> Result<[u32; 3]> {
    let required = FUNCTIONS.get(function)?.cluster();
    Ok(if required == [0; 3] { [1; 3] } else { required })
}

/// How many blocks of that many threads and bytes of dynamic shared memory a multiprocessor holds at once.
pub(crate) fn blocks_per_multiprocessor(function: &Function, threads: u32, dynamic_shared_bytes: u32) -> u32 {
    let Ok(loaded) = function.loaded() else { return 0 };
    let kernel = loaded.module().kernel(&function.name);
    kernel.map_or(0, |kernel| kernel.blocks_per_multiprocessor(threads, dynamic_shared_bytes))
}
