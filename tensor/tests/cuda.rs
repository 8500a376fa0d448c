//! CUDA devices, on a GPU or on the emulator: memory, streams, several devices, programs, graphs, faults.
//!
//! The emulator runs all of it on two GPUs at once, and on one or two with its streams held back and run in a random order that only what was
//! asked for restricts, so that a wait that is missing shows.

#[path = "cuda/algorithms.rs"]
mod algorithms;
#[path = "../../kernels/tests/cuda/driver.rs"]
mod driver;
#[path = "cuda/streams.rs"]
mod streams;

use std::process::{Command, ExitCode};

use phalanx_tensor::cuda::{Args, Graph, Grid, Pinned, Program, Readback, Target, calls, compile, emulated};
use phalanx_tensor::{Category, Context, DType, Device, Error, Tensor};

type Outcome = Result<(), Error>;
type Test = (&'static str, fn() -> Outcome);
type View = fn(&Tensor) -> Result<Tensor, Error>;

const TESTS: [Test; 19] = [
    ("elements come back from every view", views_come_back),
    ("the ledger counts a GPU's tensors", ledger_counts),
    ("devices do not mix and copies between them are ordered", devices),
    ("a program of two kernels is loaded once", two_kernels),
    ("a lane sees what its submitter has done and its submitter what it did", streams::lanes),
    ("a tensor used by a lane outlives its handles", streams::recorded),
    ("a copy that waits holds up the other work of neither device", streams::copies_beside),
    ("lanes of CPUs and GPUs wait for each other", streams::mixed_lanes),
    ("moments are the device's and have the host's time", streams::moments),
    ("a kernel runs on views and refuses other devices' tensors", kernels),
    ("a wrong program says what is wrong with it", wrong_programs),
    ("what a kernel finds wrong comes back at the next wait", faults),
    ("a captured step runs again with other inputs and draws", graphs),
    ("memory that is dropped while a step is captured is freed at the end", frees_in_a_capture),
    ("numbers come to the host while the device goes on, errors with them", readback),
    ("what goes to the device may change at once", uploads),
    ("pinned memory is the host's", pinned),
    ("the host cannot touch a GPU's elements", untouchable),
    ("all processes use one choice of an algorithm", algorithms::one_choice_for_all_processes),
];

/// Two devices, of one GPU where there is only one. The emulator has two, and one in some of the random orders.
const SETTINGS: [driver::Setting; 2] = [("PHALANX_CUDA_DEVICES", "2"), (EMULATED_DEVICES, "2")];
const EMULATED_DEVICES: &str = "PHALANX_EMULATED_DEVICES";

/// How the emulator runs streams.
const STREAMS: &str = "PHALANX_EMULATOR_STREAMS";
const SEEDS: u64 = 5;

fn main() -> ExitCode {
    if std::env::var_os(algorithms::CHILD).is_some() {
        return algorithms::child();
    }
    driver::serve("cuda", TESTS.len(), &SETTINGS, |filter| {
        let chosen = TESTS.iter().filter(|(name, _)| filter.is_none_or(|f| name.contains(f)));
        let outcomes: Vec<bool> = chosen.map(|(name, test)| told(name, test())).collect();
        let passed = outcomes.into_iter().all(|passed| passed);
        passed && (!emulated() || std::env::var_os(STREAMS).is_some() || in_other_orders(filter))
    })
}

fn told(name: &str, outcome: Outcome) -> bool {
    match &outcome {
        Ok(()) => println!("cuda: {name} ... ok"),
        Err(error) => println!("cuda: {name} ... FAILED: {error}"),
    }
    outcome.is_ok()
}

/// The same tests with streams held back.
fn in_other_orders(filter: Option<&str>) -> bool {
    let run = |seed: u64| {
        let mut again = Command::new(std::env::current_exe()?);
        let gpus = if seed.is_multiple_of(2) { "2" } else { "1" };
        again.args(filter).env(STREAMS, format!("deferred:{seed}")).env(EMULATED_DEVICES, gpus);
        let output = again.output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let failed: Vec<&str> = text.lines().filter(|line| line.contains("FAILED")).collect();
        let said = String::from_utf8_lossy(&output.stderr);
        println!(
            "cuda: streams in random order {seed}, GPUs: {gpus} ... {}",
            if output.status.success() { "ok" } else { "FAILED" }
        );
        if !output.status.success() {
            println!("{}\n{said}", failed.join("\n"));
        }
        Ok::<bool, std::io::Error>(output.status.success())
    };
    (0..SEEDS).all(|seed| run(seed).unwrap_or(false))
}

fn wrong(why: impl Into<String>) -> Outcome {
    Err(Error::invalid("test", why))
}

fn same<T: PartialEq + std::fmt::Debug>(got: T, wanted: T) -> Outcome {
    if got == wanted { Ok(()) } else { wrong(format!("got {got:?}, wanted {wanted:?}")) }
}

const GPU: Device = Device::Cuda(0);

fn counted(shape: &[usize], device: Device) -> Result<Tensor, Error> {
    let values: Vec<i64> = (0..shape.iter().product::<usize>() as i64).collect();
    Tensor::from_slice(&values, shape, device)
}

fn views_come_back() -> Outcome {
    let (host, there) = (counted(&[5, 7, 3], Device::CPU)?, counted(&[5, 7, 3], GPU)?);
    let views: [View; 5] = [
        |t| Ok(t.clone()),
        |t| t.permute(&[2, 0, 1]),
        |t| t.slice(1, 1, 7, 2),
        |t| t.select(0, 3)?.broadcast_to(&[4, 7, 3]),
        |t| t.narrow(1, 3, 0),
    ];
    for view in views {
        same(view(&there)?.to_vec::<i64>()?, view(&host)?.to_vec()?)?;
        same(view(&there)?.to_bytes()?, view(&host)?.to_bytes()?)?;
    }
    let many =
        Tensor::from_slice(&[1f32; 1 << 10], &[2; 10], GPU)?.permute(&[0, 2, 4, 6, 8, 1, 3, 5, 7, 9])?;
    same(many.contiguous()?.to_vec::<f32>()?, vec![1.0; 1 << 10])
}

fn ledger_counts() -> Outcome {
    let device = Device::Cuda(1);
    let ledger = device.ledger()?;
    let _category = Context::with(|c| c.category = Category::Parameters);
    let x = Tensor::zeros(&[1000], DType::F32, device)?;
    same(ledger.category(Category::Parameters).now, 4000)?;
    same(x.to_vec::<f32>()?, vec![0.0; 1000])?;
    drop(x);
    same((ledger.total().now, ledger.total().peak), (0, 4000))
}

fn devices() -> Outcome {
    let other = Device::Cuda(1);
    for round in 0..20 {
        let x = Tensor::from_slice(&[round; 3000], &[3000], GPU)?;
        let y = x.to_device(other, false)?;
        // Its memory may be used again at once: the copy has to be first.
        drop(x);
        let z = Tensor::from_slice(&[-1i64; 3000], &[3000], GPU)?;
        same(y.to_vec::<i64>()?, vec![round; 3000])?;
        same(z.to_device(other, false)?.to_device(GPU, false)?.to_vec::<i64>()?, vec![-1; 3000])?;
    }
    let refused = Device::Cuda(900).ledger();
    if refused.is_ok() { wrong("there is a device number 900") } else { Ok(()) }
}

/// Both use a variable of their module, so it must be the same one.
fn two_kernels() -> Outcome {
    const PROGRAM: Program<'static> = Program {
        name: "two.cu",
        files: &[(
            "two.cu",
            r#"
__device__ long long kept;
extern "C" __global__ void put(const long long* x) { kept = *x; }
extern "C" __global__ void get(long long* x) { *x = kept; }
"#,
        )],
        defines: &[],
    };
    let (gpu, x) = (GPU.gpu()?, Tensor::from_slice(&[41i64], &[1], GPU)?);
    let mut y = Tensor::zeros(&[1], DType::I64, GPU)?;
    gpu.kernel("put", &PROGRAM, "put")?.launch(Grid::new(1, 1), Args::new("put", gpu).read(&x)?)?;
    gpu.kernel("get", &PROGRAM, "get")?.launch(Grid::new(1, 1), Args::new("get", gpu).write(&mut y)?)?;
    let said = gpu.kernel("neither", &PROGRAM, "neither").map(drop).map_err(|e| e.to_string());
    match said {
        Err(why) if why.contains("neither of two.cu") => same(y.item::<i64>()?, 41),
        other => wrong(format!("got {other:?}")),
    }
}

/// Adds a number; with `LIMIT`, reports elements from it on.
const ADD: Program<'static> = Program {
    name: "add.cu",
    files: &[
        ("fault.cuh", phalanx_tensor::cuda::FAULT),
        (
            "add.cu",
            r#"
extern "C" __global__ void add(long long* x, unsigned long long n, int number, Faults* faults, unsigned code) {
    unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    x[i] += number;
    if (x[i] >= 1000) fault(faults, code, i, x[i], 1000);
}
"#,
        ),
    ],
    defines: &[],
};

fn add(x: &mut Tensor, number: i32) -> Outcome {
    add_on(GPU, x, number)
}

fn add_on(device: Device, x: &mut Tensor, number: i32) -> Outcome {
    let (gpu, n) = (device.gpu()?, x.numel());
    let args = Args::new("add", gpu).write(x)?.value(n as u64).value(number).faults()?;
    gpu.kernel("add", &ADD, "add")?.launch(Grid::new(n.div_ceil(64), 64), args)
}

fn kernels() -> Outcome {
    let x = counted(&[10, 20], GPU)?;
    add(&mut x.narrow(0, 3, 2)?, 100)?;
    let wanted: Vec<i64> = (0..200).map(|i| if (60..100).contains(&i) { i + 100 } else { i }).collect();
    same(x.to_vec::<i64>()?, wanted)?;
    let before = x.version();
    add(&mut x.clone(), 1)?;
    same(x.version(), before + 1)?;
    match add(&mut counted(&[4], Device::Cuda(1))?, 1) {
        Err(Error::Device { op: "add", .. }) => Ok(()),
        other => wrong(format!("another device's tensor: {other:?}")),
    }
}

fn wrong_programs() -> Outcome {
    let gpu = GPU.gpu()?;
    let broken = Program { name: "broken.cu", files: &[("broken.cu", "\nint x = ;")], defines: &[] };
    match gpu.kernel("test", &broken, "f").map(drop) {
        Err(error) if error.to_string().contains("broken.cu(2)") => {}
        other => return wrong(format!("a program that does not compile: {other:?}")),
    }
    match gpu.kernel("test", &ADD, "subtract").map(drop) {
        Err(error) if error.to_string().contains("subtract") => {}
        other => return wrong(format!("a kernel that is not there: {other:?}")),
    }
    // The assembler checks what the compiler does not.
    let nonsense = "extern \"C\" __global__ void f() { asm(\"nonsense.f32 x;\"); }";
    match compile("nonsense.cu", nonsense, Target::Cubin(90)) {
        Err(_) => Ok(()),
        Ok(_) => wrong("nonsense assembles"),
    }
}

fn faults() -> Outcome {
    let mut x = counted(&[100], GPU)?;
    add(&mut x, 901)?;
    match x.to_vec::<i64>() {
        Err(Error::Range { op: "add", got, wanted }) => {
            same((got.as_str(), wanted.as_str()), ("index 1000 (item 99)", "an index below 1000"))?;
        }
        other => return wrong(format!("{:?}", other.map(|x| x.len()))),
    }
    // It is told once, and the device goes on.
    same(x.narrow(0, 0, 1)?.to_vec::<i64>()?, vec![901])
}

fn graphs() -> Outcome {
    let (input, output) = (counted(&[50], GPU)?, counted(&[50], GPU)?);
    let drawn = Tensor::zeros(&[1], DType::I64, GPU)?;
    let step = || {
        step_number(&mut drawn.clone())?;
        let mut made = input.copy()?;
        add(&mut made, 5)?;
        let mut sum = made.copy()?;
        add(&mut sum, 1)?;
        drop(made);
        let mut target = output.clone();
        to_place(&mut target, &sum)
    };
    step()?;
    GPU.synchronize()?;
    let mut graph = Graph::capture(GPU, step)?;
    for round in 0..5u64 {
        add(&mut input.clone(), 10)?;
        graph.launch(round)?;
        let wanted: Vec<i64> = (0..50).map(|i| i + 10 * (round as i64 + 1) + 6).collect();
        same(output.to_vec::<i64>()?, wanted)?;
        same(drawn.to_vec::<i64>()?, vec![round as i64])?;
    }
    // What cannot be captured is refused, and the device goes on.
    match Graph::capture(GPU, || input.to_vec::<i64>().map(drop)) {
        Err(_) => same(input.to_vec::<i64>()?, (50..100).collect()),
        Ok(_) => wrong("a copy to the host was captured"),
    }
}

/// The step that random draws are made for.
fn step_number(to: &mut Tensor) -> Outcome {
    const STEP: Program<'static> = Program {
        name: "step.cu",
        files: &[(
            "step.cu",
            "typedef unsigned long long u64; struct Draws { u64 seed, site, step; const u64* step_now; }; \
             extern \"C\" __global__ void step(u64* to, Draws d) { *to = d.step_now ? *d.step_now : d.step; }",
        )],
        defines: &[],
    };
    let gpu = GPU.gpu()?;
    let args = Args::new("step", gpu).write(to)?.draws(Context::current().rng.site(3));
    gpu.kernel("step", &STEP, "step")?.launch(Grid::new(1, 1), args)
}

/// Copies by a kernel, into memory that stays.
fn to_place(to: &mut Tensor, from: &Tensor) -> Outcome {
    const COPY: Program<'static> = Program {
        name: "place.cu",
        files: &[(
            "place.cu",
            "extern \"C\" __global__ void place(long long* to, const long long* from, unsigned long long n) { \
             if (threadIdx.x < n) to[threadIdx.x] = from[threadIdx.x]; }",
        )],
        defines: &[],
    };
    let gpu = GPU.gpu()?;
    let n = from.numel() as u64;
    let args = Args::new("place", gpu).write(to)?.read(from)?.value(n);
    gpu.kernel("place", &COPY, "place")?.launch(Grid::new(1, 64), args)
}

/// The driver refuses to free on a captured stream what was allocated before.
fn frees_in_a_capture() -> Outcome {
    let [held, elsewhere] = [counted(&[40], GPU)?, counted(&[40], GPU)?];
    let output = counted(&[40], GPU)?;
    let (gpu, ledger, mut before) = (GPU.gpu()?, GPU.ledger()?, Some([held, elsewhere]));
    let step = |before: &mut Option<[Tensor; 2]>| {
        let mut sum = output.copy()?;
        add(&mut sum, 1)?;
        if let Some([held, elsewhere]) = before.take() {
            drop(held);
            std::thread::scope(|threads| {
                threads.spawn(move || drop(elsewhere));
            });
        }
        to_place(&mut output.clone(), &sum)
    };
    step(&mut None)?;
    GPU.synchronize()?;
    let bytes = ledger.total().now;
    let mut graph = Graph::capture(GPU, || step(&mut before))?;
    // Its memory goes to those who ask next, and not twice.
    let others = [counted(&[40], GPU)?, counted(&[40], GPU)?];
    graph.launch(0)?;
    same(output.to_vec::<i64>()?, (2..42).collect())?;
    for other in &others {
        same(other.to_vec::<i64>()?, (0..40).collect())?;
    }
    same(ledger.total().now, bytes)?;
    same(gpu.refused_free(), None)
}

fn readback() -> Outcome {
    let mut x = Tensor::from_slice(&[1.5, -2.0], &[2], GPU)?;
    let mut read = Readback::new(GPU, 2)?;
    same(read.finish().is_err(), true)?;
    let before = calls();
    read.start(&x)?;
    same(calls(), before)?;
    // What is written later is not what was asked for.
    x.copy_from(&Tensor::from_slice(&[7.0, 8.0], &[2], Device::CPU)?)?;
    same(read.finish()?, vec![1.5, -2.0])?;
    same(calls().waits, before.waits + 1)?;
    read.start(&x)?;
    read.start(&x)?;
    same(read.finish()?, vec![7.0, 8.0])?;
    // What a kernel has found comes with the numbers of after it, once.
    read.start(&x)?;
    let mut counted = counted(&[100], GPU)?;
    add(&mut counted, 901)?;
    same(read.finish()?, vec![7.0, 8.0])?;
    read.start(&x)?;
    match read.finish() {
        Err(Error::Range { op: "add", got, .. }) => same(got.as_str(), "index 1000 (item 99)")?,
        other => return wrong(format!("{other:?}")),
    }
    GPU.synchronize()?;
    read.start(&x)?;
    same(read.finish()?, vec![7.0, 8.0])?;
    for other in [x.narrow(0, 0, 1)?, Tensor::zeros(&[2], DType::F64, Device::CPU)?] {
        same(read.start(&other).is_err(), true)?;
    }
    Ok(())
}

fn uploads() -> Outcome {
    let sizes = [10_000, 20_000, 9_000, 600_000, 9_000, 30_000, 8_192, 9_000, 8_191, 1];
    let numbers = |round: usize, size: usize| (0..size).map(move |i| (round * 1000 + i) as f64);
    for round in 0..3 {
        let mut to = sizes
            .map(|size| Tensor::zeros(&[size], DType::F64, GPU))
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        let waits = calls().waits;
        for to in &mut to {
            let size = to.numel();
            let mut from =
                Tensor::from_slice(&numbers(round, size).collect::<Vec<_>>(), &[size], Device::CPU)?;
            to.copy_from(&from)?;
            from.copy_from(&Tensor::zeros(&[size], DType::F64, Device::CPU)?)?;
        }
        same(calls().waits, waits)?;
        for to in to {
            same(to.to_vec::<f64>()? == numbers(round, to.numel()).collect::<Vec<_>>(), true)?;
        }
    }
    Ok(())
}

fn pinned() -> Outcome {
    let mut memory = Pinned::zeros(GPU.gpu()?, 100)?;
    same(memory.iter().map(|&b| usize::from(b)).sum::<usize>(), 0)?;
    memory.fill(3);
    same(memory.to_vec(), vec![3; 100])
}

fn untouchable() -> Outcome {
    let mut x = counted(&[4], GPU)?;
    let read = x.read::<i64>("test").map(drop);
    let write = x.write::<i64>("test").map(drop);
    for outcome in [read, write] {
        match outcome {
            Err(error) if error.to_string().contains("to_device") => {}
            other => return wrong(format!("{other:?}")),
        }
    }
    match counted(&[4], Device::CPU)?.device_read("test").map(drop) {
        Err(_) => Ok(()),
        Ok(()) => wrong("a CPU's tensor has a GPU's address"),
    }
}
