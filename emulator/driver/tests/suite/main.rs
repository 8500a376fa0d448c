//! Some 480 small kernels, right and wrong, with what the emulator must say of each, in the styles of published benchmarks of races and
//! wrong accesses on GPUs.
//!
//! ```text
//! cargo test --release -p phalanx-emulated-driver --test suite              all of them
//! cargo test --release -p phalanx-emulated-driver --test suite -- block_    those whose names have this text
//! PHALANX_SUITE=print cargo test ...                                        and the report of each wrong one
//! ```
//!
//! Each topic's kernels are compiled together by NVRTC, and each is launched alone by the interpreter, in the fixed order of threads and
//! under eight seeds. Right ones are also held against values that Rust has computed. What the emulator is known to miss is in the table
//! too: such a test fails as soon as the mistake is found, and `docs/kernel_tests.md` must name it.
//!
//! Without NVRTC the tests are reported as skipped. `PHALANX_CUDA_LIBRARIES` may name the folder of `libnvrtc.so.13`.

mod asynchronous;
mod barriers;
mod bounds;
mod case;
#[path = "../common/compiler.rs"]
mod compiler;
mod costs;
mod gates;
mod grid;
mod lanes;
mod orders;
mod patterns;
mod tiles;
mod unwritten;

use std::process::ExitCode;
use std::sync::Arc;

use case::{Case, Cost, Must, Of};
use phalanx_ptx::{Checks, Counters, Fault, FaultKind, Launch, Loaded, Memory, Module, Schedule, launch};

/// A topic's name and its kernels.
type Topic = (&'static str, fn() -> Vec<Case>);

/// The topics: each is compiled as one program.
const TOPICS: [Topic; 10] = [
    ("lanes", lanes::cases),
    ("barriers", barriers::cases),
    ("grid", grid::cases),
    ("orders", orders::cases),
    ("bounds", bounds::cases),
    ("unwritten", unwritten::cases),
    ("asynchronous", asynchronous::cases),
    ("tiles", tiles::cases),
    ("patterns", patterns::cases),
    ("gates", gates::cases),
];

/// Fewer kernels than these would mean that some are not looked at.
const FEWEST: usize = 481;

/// The orders under which each kernel runs.
fn orders() -> impl Iterator<Item = Schedule> {
    std::iter::once(Schedule::Fixed).chain((1..=8).map(Schedule::Seeded))
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let filter = arguments.into_iter().find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let topics: Vec<(&str, Vec<Case>)> = TOPICS.iter().map(|(name, cases)| (*name, cases())).collect();
    let kernels: usize = topics.iter().flat_map(|(_, cases)| cases).map(|case| case.all().count()).sum();
    if !compiler::present() {
        println!(
            "suite: {kernels} kernels skipped: there is no libnvrtc (PHALANX_CUDA_LIBRARIES may name its folder)"
        );
        return ExitCode::SUCCESS;
    }
    let (mut said, mut wrong) = (Vec::new(), Vec::new());
    for (topic, cases) in &topics {
        let chosen: Vec<&Case> = cases.iter().filter(|case| case.name.contains(&filter)).collect();
        match self::run(topic, &chosen) {
            Ok((some, failures)) => {
                said.extend(some);
                wrong.extend(failures);
            }
            Err(why) => wrong.push(format!("{topic}: {why}")),
        }
    }
    let ran = said.len();
    if filter.is_empty() {
        if wrong.is_empty() && (ran < FEWEST || ran != kernels) {
            wrong.push(format!("{ran} of {kernels} kernels ran, where {FEWEST} or more are wanted"));
        }
        wrong.extend(outdated(&said));
        wrong.extend(undocumented(&topics));
        wrong.extend(first_test().err());
    }
    wrong.iter().for_each(|why| println!("suite: FAILED: {why}"));
    println!("suite: {ran} kernels under {} orders each, {} failed", orders().count(), wrong.len());
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The page that shows reports and names what is not found.
const PAGE: &str = include_str!("../../../../docs/kernel_tests.md");

/// Reports of the page that are others now, or of no kernel. `ran` has the names of kernels and what was said of each in the fixed order.
fn outdated(ran: &[(String, String)]) -> Vec<String> {
    let blocks = PAGE.split("```text\n").skip(1).filter_map(|block| block.split("```").next());
    let shown = blocks.flat_map(|block| block.split("\n\n")).map(|report| report.trim().replace('\n', " "));
    let shown: Vec<String> = shown.collect();
    // Addresses are others in each process.
    let plain = |text: &str| -> String {
        let words =
            text.split(' ').map(|word| if word.starts_with("0x") && word.len() > 10 { "0x" } else { word });
        words.collect::<Vec<_>>().join(" ")
    };
    let is_said = |report: &String| ran.iter().any(|(_, said)| plain(said) == plain(report));
    let mut wrong: Vec<String> = shown.iter().filter(|report| !is_said(report)).cloned().collect();
    if shown.len() < 25 {
        wrong.push(format!("{} reports on the page", shown.len()));
    }
    wrong
        .iter()
        .map(|report| format!("docs/kernel_tests.md: nothing is reported as there: {report}"))
        .collect()
}

/// Known misses that the page does not name.
fn undocumented(topics: &[(&str, Vec<Case>)]) -> Vec<String> {
    let page = PAGE;
    let cases = topics.iter().flat_map(|(_, cases)| cases);
    let missed = cases.flat_map(|case| {
        case.all()
            .filter(|(_, must)| matches!(must, Must::Missed(_)))
            .map(|(variant, _)| case.kernel(variant))
    });
    let unnamed = missed.filter(|kernel| !page.contains(&format!("`{kernel}`")));
    unnamed.map(|kernel| format!("{kernel} is missed, and docs/kernel_tests.md does not say so")).collect()
}

/// That the PTX of the page's kernels, with which its tests run where there is no compiler, is what the compiler makes of them.
fn first_test() -> Result<(), String> {
    let (source, kept) =
        (include_str!("../../../ptx/tests/kernels.cu"), include_str!("../../../ptx/tests/kernels.ptx"));
    let ptx = compiler::compile(source, "compute_90").map_err(|log| format!("kernels.cu: {log}"))?.to_src();
    let version = |text: &str| text.lines().find(|line| line.contains("release")).map(String::from);
    if version(&ptx) != version(kept) {
        println!("suite: kernels.ptx is not compared: it is another compiler's");
        return Ok(());
    }
    // The name of the source differs.
    let code = |text: &str| -> Vec<String> {
        let lines =
            text.lines().map(str::trim).filter(|line| !line.starts_with("//") && !line.starts_with(".file"));
        lines.filter(|line| !line.is_empty() && !line.starts_with(".version")).map(String::from).collect()
    };
    match code(&ptx) == code(kept) {
        true => Ok(()),
        false => Err("emulator/ptx/tests/kernels.ptx is not what the compiler makes of kernels.cu".into()),
    }
}

/// Names of kernels, and what was said of each in the fixed order; and what was not as it must be.
type Ran = (Vec<(String, String)>, Vec<String>);

/// Compiles and runs the kernels of a topic.
fn run(topic: &str, cases: &[&Case]) -> Result<Ran, String> {
    let (mut said, mut wrong) = (Vec::new(), Vec::new());
    if cases.is_empty() {
        return Ok((said, wrong));
    }
    let texts = cases.iter().flat_map(|case| case.all().map(|(variant, _)| case.text(variant)));
    let source = texts.collect::<String>();
    let ptx = compiler::compile(&source, "compute_90a").map_err(|log| format!("NVRTC: {log}"))?;
    let module = Module::parse(&ptx.to_src()).map_err(|error| format!("{topic}: {error}"))?;
    let module = Arc::new(module);
    for case in cases {
        wrong.extend(case.check_marks().err());
        for (variant, must) in case.all() {
            let outcomes: Vec<_> = orders().map(|order| once(&module, case, variant, order)).collect();
            if std::env::var_os("PHALANX_SUITE").is_some() {
                let first = outcomes.iter().find_map(|o| o.as_ref().err());
                println!("suite: {}: {}", case.kernel(variant), first.map_or("-".into(), Fault::to_string));
            }
            let first = match &outcomes[0] {
                Err(fault) | Ok(Left { words: Err(fault), .. }) => fault.to_string(),
                Ok(_) => String::new(),
            };
            said.push((case.kernel(variant), first));
            wrong.extend(judged(case, variant, must, &outcomes).err());
            wrong.extend(cheap(&module, case, variant, must).err());
        }
    }
    Ok((said, wrong))
}

/// What a kernel left, or what was wrong with it.
type Outcome = Result<Left, Fault>;

/// What a kernel left.
#[derive(Debug)]
struct Left {
    /// The words of its result, or which of them nothing has written.
    words: Result<Vec<i32>, Fault>,
    /// Bytes of its heap.
    bytes: u64,
}

/// Launches a variant once.
fn once(module: &Arc<Module>, case: &Case, variant: &str, schedule: Schedule) -> Outcome {
    let limits = Checks { stuck_after: case.patience, instructions_max: 1 << 21, ..Checks::default() };
    let checks = Checks { schedule, strict_barriers: case.strict, ..limits };
    launched(module, case, variant, &checks).map(|(left, _)| left)
}

/// What a variant costs in the fixed order.
fn counters(module: &Arc<Module>, case: &Case, variant: &str) -> Result<Counters, Fault> {
    let checks = Checks { counters: true, ..Checks::default() };
    launched(module, case, variant, &checks).map(|(_, counters)| counters)
}

fn launched(
    module: &Arc<Module>,
    case: &Case,
    variant: &str,
    checks: &Checks,
) -> Result<(Left, Counters), Fault> {
    let memory = Memory::new(1 << 28);
    let loaded = Loaded::new(module.clone(), &memory).expect("a few kilobytes");
    let bytes: Vec<u8> = case.x.iter().flat_map(|word| word.to_le_bytes()).collect();
    let (x, y) = (allocate(&memory, bytes.len()), allocate(&memory, 4 * case.y));
    memory.write(x, &bytes)?;
    if case.zeros {
        memory.fill(y, &[0], 4 * case.y as u64)?;
    }
    let n = (case.x.len() as u32).to_le_bytes();
    let mut parameters = [&x.to_le_bytes()[..], &y.to_le_bytes(), &n].concat();
    if let Some(map) = &case.map {
        parameters.resize(64, 0);
        parameters.extend(map.at(if map.of == Of::X { x } else { y }));
    }
    let (grid, block, shared_bytes) = (case.grid, case.block, case.shared_bytes);
    let shape = Launch { grid, block, shared_bytes, cluster: [case.cluster, 1, 1] };
    let used = memory.used();
    let report = launch(&loaded, &case.kernel(variant), &[&memory], &shape, &parameters, checks);
    let counters = report.map_err(without_folder)?.counters;
    let bytes = memory.used() - used;
    let mut result = vec![0; 4 * case.result.len()];
    let words = memory.check_written(y, result.len() as u64).and_then(|()| {
        memory.read(y, &mut result)?;
        Ok(result.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word)).collect())
    });
    let words = words.map_err(without_folder);
    Ok((Left { words, bytes }, counters))
}

/// Holds the costs of a variant against what must be.
fn cheap(module: &Arc<Module>, case: &Case, variant: &str, must: &Must) -> Result<(), String> {
    let name = case.kernel(variant);
    let wanted: Vec<Cost> = match must {
        Must::Costs(cost) => vec![*cost],
        Must::Pass if variant.is_empty() && !case.within.is_empty() => Vec::new(),
        _ => return Ok(()),
    };
    let high = costs::high(module, case, variant).map_err(|why| format!("{name}: {why}"))?;
    let counted: Vec<Cost> = high.into_iter().filter(|cost| case.within.contains(cost)).collect();
    match counted == wanted {
        true => Ok(()),
        false => Err(format!("{name}: {counted:?} are too high, where {wanted:?} must be")),
    }
}

/// A report without the folder in which the compiler believes the source to lie.
fn without_folder(mut fault: Fault) -> Fault {
    let folder = std::env::current_dir().unwrap_or_default().display().to_string() + "/";
    fault.message = fault.message.replace(&folder, "");
    let mut at = fault.at.as_deref_mut();
    while let Some(location) = at {
        location.file = location.file.replace(&folder, "");
        at = location.inlined_at.as_deref_mut();
    }
    fault
}

fn allocate(memory: &Memory, bytes: usize) -> u64 {
    memory.allocate(bytes as u64).expect("a few kilobytes")
}

/// Whether a report names a line: `a.cu:1` is not in `a.cu:12`.
fn names(text: &str, line: &str) -> bool {
    text.split(line).skip(1).any(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Holds the outcomes of all orders against what must be.
fn judged(case: &Case, variant: &str, must: &Must, outcomes: &[Outcome]) -> Result<(), String> {
    let name = case.kernel(variant);
    let same = |left: &Left| left.words.as_ref() == Ok(&case.result);
    let right = |outcome: &Outcome| outcome.as_ref().is_ok_and(|left| same(left) && left.bytes == 0);
    let is_at_host = matches!(must, Must::Fault(kinds, _) if kinds[0] == FaultKind::Uninitialised);
    let faults = outcomes.iter().map(|outcome| match outcome {
        Err(fault) => Some(fault),
        Ok(left) => left.words.as_ref().err().filter(|_| is_at_host),
    });
    let not: Vec<usize> = (0..).zip(faults.clone()).filter_map(|(n, f)| f.is_none().then_some(n)).collect();
    let faults: Vec<&Fault> = faults.flatten().collect();
    let lines = case.lines(variant);
    match must {
        Must::Missed(why) if !faults.is_empty() => Err(format!(
            "{name}: it is found now ({}), and was known to be missed ({why}): say so in its case and in docs/kernel_tests.md",
            faults[0]
        )),
        Must::Pass | Must::Costs(_) | Must::WrongResult | Must::Leak if !faults.is_empty() => {
            Err(format!("{name}: a fault that is not expected, under {} orders: {}", faults.len(), faults[0]))
        }
        Must::Pass | Must::Costs(_) => match outcomes.iter().position(|outcome| !right(outcome)) {
            Some(at) => {
                Err(format!("{name}: order {at}: {:?} where {:?} is right", outcomes[at], case.result))
            }
            None => Ok(()),
        },
        Must::Leak if outcomes.iter().flatten().all(|left| same(left) && left.bytes > 0) => Ok(()),
        Must::Leak => Err(format!("{name}: no memory is left")),
        Must::WrongResult if outcomes.iter().all(right) => Err(format!("{name}: no order has wrong values")),
        Must::Missed(_) if !outcomes.iter().all(right) => {
            Err(format!("{name}: wrong values, where nothing was found so far"))
        }
        Must::WrongResult | Must::Missed(_) => Ok(()),
        Must::Fault(kinds, texts) | Must::FaultInSomeOrder(kinds, texts) => {
            let all = matches!(must, Must::Fault(..));
            if faults.is_empty() || all && !not.is_empty() {
                return Err(format!("{name}: not found under the orders {not:?}"));
            }
            for fault in faults {
                let text = fault.to_string();
                // Of another kind that the mistake may be, the report is not looked at.
                let mut lacking: Vec<&str> = Vec::new();
                if kinds[0] == fault.kind {
                    lacking.extend(texts.iter().filter(|piece| !text.contains(**piece)));
                    lacking.extend(lines.iter().map(String::as_str).filter(|line| !names(&text, line)));
                }
                if !kinds.contains(&fault.kind) || !lacking.is_empty() {
                    return Err(format!("{name}: {kinds:?} is wanted with {lacking:?}, not {text}"));
                }
            }
            Ok(())
        }
    }
}
