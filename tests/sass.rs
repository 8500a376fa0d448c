//! The assembly of the kernels that training steps of a GPT-2 and of a Llama launch, and of our own products, held to a table: no spill, no
//! narrower access, no lower occupancy, no lost tensor instruction, no more instructions than 2 % above.
//!
//! ```text
//! cargo test --release --test sass                        compares with tests/sass/kernels.jsonl
//! PHALANX_SASS=write cargo test --release --test sass     writes that file anew, to be read as a diff and committed
//! ```
//!
//! NVRTC alone gives registers, spills and shared memory. Instructions are looked at where `nvdisasm` is in `bin` beside a folder of
//! `PHALANX_CUDA_LIBRARIES`, or in `PATH`. The table is of one version of NVRTC; with another one nothing is compared. A program that is the
//! table's, by a hash of all that decides its code, is not assembled again.

#[path = "sass/assembly.rs"]
mod assembly;
#[path = "../kernels/tests/cuda/code.rs"]
mod code;
#[path = "../kernels/tests/cuda/driver.rs"]
mod driver;
#[path = "sass/flow.rs"]
mod flow;
#[path = "sass/table.rs"]
mod table;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::sync::OnceLock;
use std::thread;

use assembly::{CHIPS, Chip, mix, occupancy, resources};
use phalanx::autograd::ContextMode;
use phalanx::nn::models::{Decoder, GptConfig, LlamaConfig};
use phalanx::nn::{AdamW, Clip, Group, Parameters, Result, Rule, Scope, grad_norm};
use phalanx::tensor::RngKey;
use phalanx::tensor::cuda::{KernelSource, Span, Target, Work, compile, start_trace, take_trace};
use phalanx::{Context, DType, Device, Tensor, Var};
use table::{MixRow, Row};

type Test = (&'static str, fn() -> std::result::Result<(), String>);

const TESTS: [Test; 8] = [
    ("loops are read from a text", flow::test_of_a_text),
    ("widths and classes are read from a text", assembly::test_of_a_mix),
    ("occupancy is NVIDIA's", assembly::test_of_occupancy),
    ("each kind of regression is found", table::test_of_comparison),
    ("no kernel of a step is worse than in the table", kernels),
    ("nor a product that cuBLASLt does not compute", own_products),
    ("softmax runs beside the products of warpgroups", overlap),
    ("kernels that are broken on purpose are found", broken),
];

const GPU: Device = Device::Cuda(0);
const A100: driver::Setting = ("PHALANX_EMULATED_CAPABILITY", "80");
const CONTEXT: usize = 32;

fn main() -> ExitCode {
    driver::serve("sass", TESTS.len(), &[], |filter| {
        let chosen = TESTS.iter().filter(|(name, _)| filter.is_none_or(|f| name.contains(f)));
        let run = |(name, test): &Test| match test() {
            Ok(()) => {
                println!("sass: {name} ... ok");
                true
            }
            Err(why) => {
                println!("sass: {name} ... FAILED: {why}");
                false
            }
        };
        let outcomes: Vec<bool> = chosen.map(run).collect();
        outcomes.into_iter().all(|passed| passed)
    })
}

/// A kernel as an operation launches it.
type Launch = (&'static str, &'static KernelSource, Block);

/// A block's threads and dynamic shared memory.
#[derive(Clone, Copy, PartialEq)]
struct Block {
    threads: u32,
    shared_bytes: u32,
}

/// The models, one block of each with the widths and depths of heads of large ones. They are what decides which kernels are compiled,
/// not the number of tokens. Vocabularies are as wide as those whose rows no block keeps in registers, the first of them odd.
fn models() -> Vec<(&'static str, Decoder)> {
    let gpt = |dtype, stream| {
        let config = GptConfig { stream, ..GptConfig::new(8257, CONTEXT, 1, 12, 768) };
        config.init(&Scope::new(1, dtype, GPU)).unwrap_or_else(|e| panic!("{e}"))
    };
    let llama = || {
        let config = LlamaConfig { key_heads: 2, ..LlamaConfig::new(8264, CONTEXT, 1, 8, 1024) };
        config.init(&Scope::new(1, DType::BF16, GPU)).unwrap_or_else(|e| panic!("{e}"))
    };
    vec![
        ("GPT-2 in bf16 on a stream in f32", gpt(DType::BF16, Some(DType::F32))),
        ("GPT-2 in f32", gpt(DType::F32, None)),
        ("Llama in bf16", llama()),
    ]
}

/// The launches of a training step, in their order.
fn step(model: &Decoder) -> Result<Vec<Launch>> {
    for parameter in model.parameters().iter().filter(|p| p.dtype() == DType::BF16) {
        parameter.set_grad_dtype(DType::F32)?;
    }
    // One kernel updates parameters of any size, so the emulator is given the small ones.
    let small = model.parameters().into_iter().filter(|p| p.tensor().numel() <= 1 << 16).collect();
    let mut optimizer = AdamW::default().init(Group::decay_matrices(small, 1e-3, 0.1))?;
    let ids = |from: i64| {
        let ids: Vec<i64> = (from..from + CONTEXT as i64).collect();
        Ok::<_, phalanx::nn::Error>(Var::new(Tensor::from_slice(&ids, &[1, CONTEXT], GPU)?))
    };
    let (input, target) = (ids(0)?, ids(1)?);
    let _context = Context::with(|c| {
        c.set_train(true);
        c.rng = RngKey { seed: 1, step: 0 };
    });
    let mut work = || {
        // The second backward pass adds to the gradients of the first.
        for _ in 0..2 {
            model.loss(&model.forward(&input)?, &target, 1.0 / CONTEXT as f64)?.backward()?;
        }
        let norm = grad_norm(&optimizer.parameters())?;
        optimizer.step_scaled(Clip::new(norm, 1.0).scale)?;
        optimizer.zero_grad()
    };
    traced(&mut work)
}

/// The launches of `work`, in their order.
fn traced<E>(work: &mut dyn FnMut() -> std::result::Result<(), E>) -> std::result::Result<Vec<Launch>, E> {
    start_trace();
    let done = work();
    let spans = take_trace();
    done?;
    let launch = |span: Span| match span.work {
        Work::Kernel { source, threads, shared_bytes, .. } => {
            Some((span.op, source, Block { threads: threads.iter().product(), shared_bytes }))
        }
        _ => None,
    };
    Ok(spans.into_iter().filter_map(launch).collect())
}

/// Adds those of the launches that are not there yet.
fn add_kinds(kinds: &mut Vec<Launch>, launches: Vec<Launch>) {
    for launch in launches {
        if !kinds.contains(&launch) {
            kinds.push(launch);
        }
    }
}

/// The launches of a step of each model, each kind once. They are made once.
fn launches() -> std::result::Result<&'static [Launch], String> {
    static LAUNCHES: OnceLock<std::result::Result<Vec<Launch>, String>> = OnceLock::new();
    let make = || {
        let mut kinds: Vec<Launch> = Vec::new();
        for (name, model) in models() {
            let all = step(&model).map_err(|e| format!("{name}: {e}"))?;
            println!("sass: {name}: {} launches", all.len());
            add_kinds(&mut kinds, all);
        }
        Ok(kinds)
    };
    LAUNCHES.get_or_init(make).as_deref().map_err(Clone::clone)
}

/// The kernels of this GPU, while a process does the same whose emulated GPU is the other chip.
fn kernels() -> std::result::Result<(), String> {
    let begin = || driver::beside(&["no kernel of a step is worse".to_string()], &[A100]);
    let mut other = emulates(&CHIPS[1])?.then(begin);
    if is_writing() {
        // To the same file.
        other.take().map_or(Ok(()), |process| ended("an A100's", process))?;
    }
    // It is waited for whatever comes of this one.
    let held = launches().and_then(|all| held(all, |row| !is_own_product(row))).map(drop);
    let other = other.map_or(Ok(()), |process| ended("an A100's", process));
    held.and(other)
}

/// Waits for a process of ours.
fn ended(what: &str, process: std::io::Result<Child>) -> std::result::Result<(), String> {
    match process.and_then(|mut process| process.wait()) {
        Ok(status) if status.success() => Ok(()),
        outcome => Err(format!("{what}: {outcome:?}")),
    }
}

fn is_writing() -> bool {
    std::env::var_os("PHALANX_SASS").is_some_and(|value| value == "write")
}

/// Compares the launches' rows with those of the table that are for this GPU and `named`, or writes these anew. Returns them.
fn held(launches: &[Launch], named: impl Fn(&Row) -> bool) -> std::result::Result<Vec<Row>, String> {
    let tool = nvdisasm();
    if tool.is_none() {
        println!(
            "sass: instructions are not looked at: there is no nvdisasm (pip install nvidia-cuda-nvdisasm)"
        );
    }
    let tool = tool.as_deref();
    let chip = chip()?;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sass/kernels.jsonl");
    let text = std::fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    let (known, others) =
        table::parse(&text)?.into_iter().partition::<Vec<_>, _>(|row| row.arch == chip.arch && named(row));
    let (compiler, all) = rows(chip, launches, tool, if is_writing() { &[] } else { &known })?;
    println!("sass: {} rows for {} by NVRTC {compiler}", all.len(), chip.arch);
    if is_writing() {
        let mut both = [others, all.clone()].concat();
        both.sort_by_key(|row| (row.arch.clone(), is_own_product(row)));
        let text = table::text(&compiler, &both);
        return match tool {
            Some(_) => std::fs::write(&file, text).map(|()| all).map_err(|e| e.to_string()),
            None => Err("a table needs nvdisasm".into()),
        };
    }
    println!("sass: {} other rows are not looked at here", others.len());
    let of = table::compiler_of(&text);
    if of != compiler {
        println!("sass: skipped: the table is NVRTC {of}'s, and this is {compiler}");
        return Ok(all);
    }
    let wrong = table::compare(&all, &known);
    let again = "if it is meant, `PHALANX_SASS=write cargo test --release --test sass` writes the table anew";
    if wrong.is_empty() { Ok(all) } else { Err(format!("{}\n{again}", wrong.join("\n"))) }
}

/// What is launched depends on the GPU: kernels of warpgroups are a Hopper's alone.
fn chip() -> std::result::Result<&'static Chip, String> {
    Ok(if emulates(&CHIPS[1])? { &CHIPS[1] } else { &CHIPS[0] })
}

fn is_own_product(row: &Row) -> bool {
    ["gemm.cu", "warpgroup.cu"].contains(&row.file.as_str())
}

/// Products of bf16 in the three forms of a linear layer, by wide tiles and by narrow ones, in a process that is told to compute them by our own
/// kernels. On a Hopper GPU all of them are products of warpgroups.
fn own_products() -> std::result::Result<(), String> {
    const OWN: driver::Setting = ("PHALANX_CUDA_ALGORITHMS", "own");
    if std::env::var_os(OWN.0).is_none_or(|value| value != OWN.1) {
        for settings in [&[OWN][..], &[OWN, A100]] {
            let named = "a product that cuBLASLt does not".to_string();
            ended(&format!("with {settings:?}"), driver::beside(&[named], settings))?;
        }
        return Ok(());
    }
    let products = |rows: usize, width: usize| -> phalanx::tensor::Result<()> {
        let ones = |shape: [usize; 2]| phalanx::kernels::full(&shape, 1.0, DType::BF16, GPU);
        let (input, weight, gradient) = (ones([rows, 256])?, ones([width, 256])?, ones([rows, width])?);
        phalanx::kernels::matmul(&input, &weight.transpose(0, 1)?)?;
        phalanx::kernels::matmul(&gradient, &weight)?;
        phalanx::kernels::matmul(&gradient.transpose(0, 1)?, &input)?;
        Ok(())
    };
    // Too few tiles for wide ones, and enough.
    let all = traced(&mut || products(128, 128).and_then(|()| products(1024, 1024)));
    let mut all = all.map_err(|e| e.to_string())?;
    all.retain(|(op, ..)| *op == "matmul");
    let mut kinds = Vec::new();
    add_kinds(&mut kinds, all);
    let rows = held(&kinds, is_own_product)?;
    let (file, wanted) = if chip()?.capability == 90 { ("warpgroup.cu", 6) } else { ("gemm.cu", 3) };
    let found = rows.iter().filter(|row| row.file == file).count();
    if (found, rows.len()) == (wanted, wanted) {
        return Ok(());
    }
    Err(format!("got {} kernels, {found} of them of {file}, wanted {wanted} of it", rows.len()))
}

fn emulates(chip: &Chip) -> std::result::Result<bool, String> {
    let (major, _) = GPU.gpu().map_err(|e| e.to_string())?.capability();
    Ok(major * 10 == chip.capability)
}

/// A change that makes a kernel worse: of which operation and function, the text, the text in its place, and what is then reported.
struct Damage {
    kernel: (&'static str, &'static str),
    text: &'static str,
    instead: &'static str,
    report: &'static str,
}

const DAMAGES: [Damage; 4] = [
    Damage {
        kernel: ("add_layer_norm_backward", "backward"),
        text: "TEAM_KERNEL backward(",
        instead: "extern \"C\" __global__ void __launch_bounds__(THREADS, 8) backward(",
        report: "spills ",
    },
    Damage {
        kernel: ("scaled_dot_product_attention", "attention_forward"),
        text: "        multiply_columns(c, a[k], matrix_at(b + k * 16 * PIECE_PITCH, B_ROWS * PIECE_PITCH));",
        instead: "        c[k][0] += __uint_as_float(a[k][0]);",
        report: "tensor instructions (HMMA, HGMMA), wanted",
    },
    Damage {
        kernel: ("silu_mul", "contiguous"),
        text: "constexpr int LANES = 16 /",
        instead: "constexpr int LANES = 8 /",
        report: "of its global accesses move 128 bits",
    },
    Damage {
        kernel: ("silu_mul", "contiguous"),
        text: "{ run_contiguous(each, out, in, n); }",
        instead: "{ f32 kept[128]; for (int i = 0; i < 128; i++) kept[i] = ((const volatile f32*)in.at[0])[i]; \
                  run_contiguous(each, out, in, n); for (int i = 0; i < 128; i++) ((volatile f32*)out)[i] = kept[i]; }",
        report: "by registers",
    },
];

/// In the loop of attention's forward pass exponentials stand between the start of the products with values and the wait for them.
fn overlap() -> std::result::Result<(), String> {
    let (chip, Some(tool)) = (&CHIPS[1], nvdisasm()) else { return Ok(()) };
    if !emulates(chip)? {
        return Ok(());
    }
    let named = "attention_forward";
    for (_, source, _) in launches()?
        .iter()
        .filter(|(_, source, _)| source.entry == named && source.program.starts_with("warpgroup"))
    {
        let most = |text: &str| -> std::result::Result<usize, String> {
            let program = assembled(chip, source, text, Some(&tool))?;
            let text = program.instructions.unwrap_or_default();
            Ok(assembly::exponentials_beside_products(&text, named))
        };
        let (whole, waits) = (source.text(), ["products_wait<1>(s[0]);", "products_wait<0>(s[0]);"]);
        let (beside, after) = (most(&whole)?, most(&whole.replacen(waits[0], waits[1], 1))?);
        println!("sass: {source}: {beside} exponentials while products run, {after} if all are waited for");
        if beside < 64 || after >= 64 {
            return Err(format!("{source}: got {beside} and {after}, wanted 64 or more and fewer"));
        }
    }
    Ok(())
}

fn broken() -> std::result::Result<(), String> {
    let tool = nvdisasm();
    let chip = &CHIPS[1];
    for Damage { kernel: (op, entry), text, instead, report } in &DAMAGES {
        let found = launches()?.iter().find(|(of, source, _)| of == op && source.entry == *entry);
        let launch @ (_, source, _) = found.ok_or_else(|| format!("no step launches {entry} of {op}"))?;
        let (whole, changed) = (source.text(), source.text().replacen(text, instead, 1));
        if whole == changed {
            return Err(format!("{source} has no {text:?}"));
        }
        let row = |text: &str| row(chip, launch, &assembled(chip, source, text, tool.as_deref())?);
        let (known, worse) = (row(&whole)?, row(&changed)?);
        let why = worse.worse_than(&known);
        let looked = tool.is_some() || ["spills ", "by registers"].contains(report);
        if looked && !why.iter().any(|why| why.contains(report)) {
            return Err(format!("{source} with {instead:?}: got {why:?}, wanted {report:?}"));
        }
    }
    Ok(())
}

/// A program that was assembled: the log, the CUBIN, and the instructions if there is a tool that shows them.
struct Assembled {
    log: String,
    cubin: Vec<u8>,
    instructions: Option<String>,
}

fn assembled(
    chip: &Chip,
    source: &KernelSource,
    text: &str,
    tool: Option<&Path>,
) -> std::result::Result<Assembled, String> {
    let image = compile(&source.program, text, Target::Cubin(chip.capability))?;
    let instructions = tool.map(|tool| disassembled(tool, chip, &image.code)).transpose()?;
    Ok(Assembled { log: image.log, cubin: image.code, instructions })
}

/// The compiler's version, and a row for each launch. Programs of `known` rows are not assembled, but for one, which names the compiler.
fn rows(
    chip: &Chip,
    launches: &[Launch],
    tool: Option<&Path>,
    known: &[Row],
) -> std::result::Result<(String, Vec<Row>), String> {
    let found = |(op, source, block): &Launch, code: &str| {
        known.iter().find(|row| {
            let same = row.code == code && row.op == *op && row.entry == source.entry;
            same && (row.threads, row.dynamic_shared) == (block.threads.into(), block.shared_bytes.into())
        })
    };
    let (mut sources, mut codes): (BTreeMap<String, &KernelSource>, Vec<String>) = Default::default();
    for launch @ (_, source, _) in launches {
        let text = source.text();
        let code = code::hash(&source.program, &text, chip.capability)?;
        if codes.is_empty() || found(launch, &code).is_none() {
            sources.insert(text, *source);
        }
        codes.push(code);
    }
    println!("sass: {} programs for {} are assembled", sources.len(), chip.arch);
    let half = |first: usize| {
        let mine = sources.iter().skip(first).step_by(2);
        mine.map(|(text, source)| Ok((text.clone(), assembled(chip, source, text, tool)?))).collect()
    };
    let halves: [std::result::Result<Vec<_>, String>; 2] = thread::scope(|scope| {
        let other = scope.spawn(|| half(1));
        [half(0), other.join().unwrap_or_else(|_| Err("a thread panicked".into()))]
    });
    let [one, other] = halves;
    let programs: HashMap<String, Assembled> = one?.into_iter().chain(other?).collect();
    let (mut numbers, mut all): (BTreeMap<String, u64>, Vec<Row>) = Default::default();
    for (launch, code) in launches.iter().zip(codes) {
        let (source, of_table) = (launch.1, found(launch, &code).cloned());
        let row = match programs.get(&source.text()) {
            Some(program) => row(chip, launch, program)?,
            None => of_table.ok_or_else(|| format!("{source} was not assembled"))?,
        };
        let mut row = Row { number: 0, code, ..row };
        let number = numbers.entry(row.key()).or_default();
        *number += 1;
        row.number = *number;
        all.push(row);
    }
    let compiler = programs.values().find_map(|program| version(&program.cubin)).unwrap_or_default();
    Ok((compiler, all))
}

fn row(chip: &Chip, (op, source, block): &Launch, program: &Assembled) -> std::result::Result<Row, String> {
    let found = resources(&program.log, &source.entry);
    let found = found.ok_or_else(|| format!("{source}: not in {}", program.log))?;
    let (threads, dynamic_shared) = (u64::from(block.threads), u64::from(block.shared_bytes));
    let (blocks, limit) = occupancy(chip, &found, threads, dynamic_shared);
    let warps = blocks * threads.div_ceil(32);
    let mix = program.instructions.as_deref().map(|text| mix_row(mix(chip, text, &source.entry, warps)));
    Ok(Row {
        op: (*op).into(),
        entry: source.entry.clone(),
        file: source.program.clone(),
        macros: source.macros(),
        number: 0,
        arch: chip.arch.into(),
        threads,
        dynamic_shared,
        code: String::new(),
        registers: found.registers,
        spill_bytes: found.spill_bytes,
        static_shared: found.static_shared,
        blocks,
        warps,
        limit: limit.into(),
        mix,
    })
}

fn mix_row(mix: assembly::Mix) -> MixRow {
    let (peak_of, peak_share) = mix.peak.unwrap_or(("", 1.0));
    MixRow {
        instructions: mix.instructions,
        classes: mix.classes.into_iter().map(|(class, count)| (class.into(), count)).collect(),
        wide_share: mix.wide_share,
        peak_of: peak_of.into(),
        peak_share,
        bound: mix.bound.into(),
    }
}

/// The version of the compiler that a CUBIN names.
fn version(cubin: &[u8]) -> Option<String> {
    let mark = b"Cuda compilation tools, release ";
    let at = cubin.windows(mark.len()).position(|bytes| bytes == mark)? + mark.len();
    let end = cubin[at..].iter().position(|&byte| byte == 0)?;
    Some(String::from_utf8_lossy(&cubin[at..at + end]).into_owned())
}

fn nvdisasm() -> Option<PathBuf> {
    let libraries = std::env::var_os("PHALANX_CUDA_LIBRARIES").unwrap_or_default();
    let beside = std::env::split_paths(&libraries)
        .filter_map(|lib| Some(lib.parent()?.join("bin")))
        .collect::<Vec<_>>();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let all = beside.into_iter().chain(std::env::split_paths(&path));
    all.map(|folder| folder.join("nvdisasm")).find(|tool| tool.is_file())
}

fn disassembled(tool: &Path, chip: &Chip, cubin: &[u8]) -> std::result::Result<String, String> {
    let by = (std::process::id(), thread::current().id());
    let file = std::env::temp_dir().join(format!("phalanx-{by:?}-{}.cubin", chip.arch));
    std::fs::write(&file, cubin).map_err(|e| e.to_string())?;
    let output = Command::new(tool).arg("-c").arg(&file).output().map_err(|e| e.to_string());
    let _ = std::fs::remove_file(&file);
    let output = output?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{}: {}", tool.display(), String::from_utf8_lossy(&output.stderr))),
    }
}
