//! Ranks as processes of their own, which this program starts by starting itself: they agree on everything before the first step, or each
//! says what differs.

#[path = "launched/generated.rs"]
mod generated;
#[cfg(unix)]
#[path = "launched/launcher.rs"]
mod launcher;
#[path = "../../parallel/tests/comm/port.rs"]
mod port;
#[cfg(unix)]
#[path = "launched/replaced.rs"]
mod replaced;
#[cfg(target_os = "linux")]
#[path = "launched/resized.rs"]
mod resized;
#[cfg(unix)]
#[path = "launched/signals.rs"]
mod signals;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use phalanx_nn::Scope;
use phalanx_nn::models::{GptConfig, ModelConfig, save_model};
use phalanx_parallel::hybrid::decoder;
use phalanx_tensor::{DType, Device, Tensor};
use phalanx_train::data::{Dataset, TensorDataset, TokenFile, TokenWindows, Width};
use phalanx_train::{
    Callback, Config, Error, Event, MeshRank, Replay, Result, Settings, Trainer, keyed, numbers_in, start,
    stop_on_signals,
};

use port::free_port;

keyed! {
    /// A run of a program with settings of its own.
    pub struct Program {
        in run: Config = Config::default(),
        /// Weight decay.
        "weight-decay" weight_decay: f64 = 0.1,
        /// What the first rank prints samples of.
        "prompt" prompt: String = String::new(),
    }
}

/// What every run has.
const COMMON: &str = "--steps 2 --batch 4 --threads 1 --workers 0 --timeout 20 --join-timeout 20";

fn model() -> ModelConfig {
    ModelConfig::Gpt(GptConfig::new(11, 4, 2, 2, 8))
}

/// One rank: trains a small GPT as `FLAGS` says, with the weights of the folder `WEIGHTS` if it is named, or repeats the second step
/// from the checkpoint `REPLAY`. `VALIDATION` chooses data to validate on, `DIRECTORY` is where it runs.
/// `MIDDLE` changes a number in the middle of the data; `TEXT` is a file of tokens to train on in their place.
/// With `SLOW` it says the number of each step, and waits after it while there is that file. With `AT_END` it works for a while after its
/// last step. With `GENERATE` it continues prompts with the model of that folder, over as many tensor-parallel ranks as there are, and the
/// rank `ABORTS` dies after some tokens. Says how that ended.
#[test]
#[ignore = "a part of other tests"]
fn child() {
    let outcome = std::env::var_os("GENERATE").map_or_else(train, |folder| generated::write(folder.as_ref()));
    match outcome {
        Ok(()) => println!("\nended well"),
        Err(Error::Differs(what)) => println!("\nended unlike: {what}"),
        Err(error) => println!("\nended with: {error}"),
    }
}

/// Prints what a run does otherwise than it was asked to.
struct Notices;

impl Callback for Notices {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        if let Event::Notice { text, .. } = event {
            println!("\nnotice: {text}");
        }
        Ok(())
    }
}

fn train() -> Result<()> {
    let flags = std::env::var("FLAGS").unwrap();
    if let Some(directory) = std::env::var_os("DIRECTORY") {
        std::env::set_current_dir(directory).unwrap();
    }
    let weights = std::env::var_os("WEIGHTS").map(PathBuf::from);
    let validated = std::env::var("VALIDATION").ok().map(|by| by.parse().unwrap());
    let mut settings = Settings::new(Program::default());
    settings.words(COMMON.split(' ').chain(flags.split_whitespace()).map(String::from))?;
    let config = settings.resolve()?.run;
    let tokens: Vec<i64> = (0..32 * 4).map(|i| (i * i + i / 3) % 11).collect();
    let rows = |by: i64| {
        let tokens: Vec<i64> = tokens.iter().map(|token| (token + by) % 11).collect();
        Tensor::from_slice(&tokens, &[32, 4], Device::CPU)
    };
    let data = TensorDataset::new(vec![rows(0)?, rows(1)?])?;
    if std::env::var_os("MIDDLE").is_some() {
        data.item(17, 0)?[0].select(0, 2)?.copy_from(&Tensor::scalar(3i64, Device::CPU)?)?;
    }
    start(
        &config,
        |_| {},
        |process| {
            let config = config.for_process(process)?;
            let part = |rank: &MeshRank| {
                Ok(decoder(&model(), &config.layout, &rank.groups, &rank.scope(&config), weights.as_deref())?)
            };
            println!("\nprocess {}", std::process::id());
            println!("\nledger {}", Device::CPU.ledger()?.total().now);
            let trainer = Trainer::new(config.clone()).settings("launched", &settings).callback(Notices);
            let mut trainer =
                trainer.in_process_group(process).data(data.clone()).stop_when(stop_on_signals()?);
            if let Some(slow) = std::env::var_os("SLOW").map(PathBuf::from) {
                trainer = trainer.every(1, move |run| {
                    println!("\nafter {}", run.done());
                    if slow.exists() {
                        std::thread::sleep(Duration::from_millis(200));
                    }
                    Ok(None)
                });
            }
            if let (Ok(steps), Ok(go_on)) = (std::env::var("HELD_AT"), std::env::var("GO_ON")) {
                // The run waits after these steps, until there is a file for each.
                let held: Vec<u64> = steps.split_whitespace().map(|step| step.parse().unwrap()).collect();
                trainer = trainer.every(1, move |run| {
                    while held.contains(&run.done()) && !Path::new(&format!("{go_on}{}", run.done())).exists()
                    {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Ok(None)
                });
            }
            if std::env::var_os("AT_END").is_some() {
                trainer = trainer.at_end(|_| {
                    println!("\nat the end");
                    std::thread::sleep(Duration::from_secs(1));
                    Ok(())
                });
            }
            if let Some(path) = std::env::var_os("TEXT") {
                trainer = trainer.samples(TokenWindows::new(TokenFile::open(path, Width::U16)?, 4, 1)?, 4);
            }
            if let Some(by) = validated {
                trainer = trainer.validation(TensorDataset::new(vec![rows(by)?, rows(by + 1)?])?);
            }
            match std::env::var("REPLAY") {
                Ok(from) => {
                    trainer.replay(&Replay { from: from.into(), steps: 1..2 }, part)?.check().map(drop)
                }
                Err(_) => trainer.run_parts(part).map(drop),
            }
        },
    )
}

/// A rank's flags and variables.
#[derive(Clone, Default)]
struct Rank {
    flags: String,
    variables: Vec<(&'static str, String)>,
}

fn rank(flags: impl Into<String>) -> Rank {
    Rank { flags: flags.into(), variables: Vec::new() }
}

impl Rank {
    fn with(mut self, name: &'static str, value: impl Into<String>) -> Rank {
        self.variables.push((name, value.into()));
        self
    }

    fn start(&self, number: usize, size: usize, port: u16) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["child", "--exact", "--ignored", "--nocapture"]).env("FLAGS", &self.flags);
        let numbers = [("RANK", number), ("WORLD_SIZE", size), ("MASTER_PORT", port.into())];
        command.envs(numbers.map(|(name, number)| (name, number.to_string())));
        command.env("MASTER_ADDR", "127.0.0.1").envs(self.variables.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

/// How each rank says that it ended.
fn outcomes(ranks: &[Rank]) -> Vec<String> {
    let (port, begin) = (free_port(), Instant::now());
    let children: Vec<Child> =
        ranks.iter().enumerate().map(|(number, rank)| rank.start(number, ranks.len(), port)).collect();
    let outputs = children.into_iter().map(ended).collect();
    assert!(begin.elapsed() < Duration::from_secs(50), "took {:?}", begin.elapsed());
    outputs
}

fn ended(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().find_map(|line| line.strip_prefix("ended "));
    line.map_or_else(|| format!("{output:?}"), String::from)
}

/// A folder of its own.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("phalanx-launched-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_difference_in_what_ranks_were_given_is_named_by_every_rank_with_both_values() {
    let folder = Folder::new("unlike");
    let out = folder.path("run");
    let both = rank("--dp 2");
    for (second, wanted) in [
        (rank("--dp 2 --weight-decay 0.2"), "`weight-decay` is 0.1 on rank 0, and 0.2 on rank 1"),
        (rank("--dp 2 --lr 0.5"), "`lr` is 0.001 on rank 0, and 0.5 on rank 1"),
        (rank(format!("--dp 2 --out {out}")), &format!("`out` is none on rank 0, and {out} on rank 1")[..]),
        (rank("--dp 2 --dtype bf16 --grad-dtype f32"), "`dtype` is f32 on rank 0, and bf16 on rank 1"),
        (both.clone().with("PHALANX_ISA", "scalar"), ", and scalar on rank 1"),
    ] {
        for said in outcomes(&[both.clone(), second]) {
            assert!(
                said.contains("the ranks were given different things: ") && said.contains(wanted),
                "{said}"
            );
        }
    }
    let validated = |by| both.clone().with("VALIDATION", by);
    for said in outcomes(&[validated("0"), validated("1")]) {
        assert!(said.contains("validation rows and trace is [], Some(\"32 "), "{said}");
        assert!(said.contains("false on rank 0, and [], Some(\"32 "), "{said}");
    }
    assert!(!Path::new(&out).exists(), "a run that does not begin leaves a folder");
}

#[test]
fn ranks_may_differ_in_what_changes_no_bit() {
    let folder = Folder::new("own");
    let apart = ["a", "b"].map(|name| {
        let scratch = folder.path(name);
        rank(format!("--dp 2 --prompt {name} --zero 1 --offload optimizer --offload-dir {scratch}"))
    });
    assert_eq!(outcomes(&apart), ["well"; 2]);
}

#[test]
fn ranks_that_resume_different_checkpoints_are_refused() {
    let folder = Folder::new("resumed");
    // The same step, on disks of their own.
    for (name, lr) in [("a", "0.1"), ("b", "0.2")] {
        let outcomes = outcomes(&[rank(format!("--out {} --lr {lr}", folder.path(name)))]);
        assert_eq!(outcomes, ["well"]);
    }
    let out = folder.path("out");
    let resumed = |name: &str| rank(format!("--dp 2 --steps 4 --out {out} --resume {}", folder.path(name)));
    for said in outcomes(&[resumed("a"), resumed("b")]) {
        assert!(said.contains("the checkpoint to `resume` is step 2 with the index "), "{said}");
    }
    for said in outcomes(&[resumed("a"), resumed("nowhere")]) {
        assert!(said.contains(" on rank 0, and none (") && said.contains("nowhere"), "{said}");
    }
    assert_eq!(outcomes(&[resumed("a"), resumed("a")]), ["well"; 2]);
    assert_eq!(numbers_in(Path::new(&out).join("metrics.jsonl").as_path(), "loss").len(), 2);
}

#[test]
fn timeouts_are_flags_and_their_errors_name_who_did_not_come() {
    let alone = ended(rank("--dp 2 --join-timeout 1").start(0, 2, free_port()));
    assert!(
        alone.contains("rank 1 of 2 did not come to 127.0.0.1:") && alone.contains(" within 1 s"),
        "{alone}"
    );
    // A process that stops in the middle of a run.
    let (folder, port) = (Folder::new("stopped"), free_port());
    let metrics = folder.0.join("run/metrics.jsonl");
    let flags = format!("--dp 2 --steps 100000000 --timeout 3 --out {}", folder.path("run"));
    let [first, second] = [0, 1].map(|number| rank(&flags[..]).start(number, 2, port));
    let end = Instant::now() + Duration::from_secs(20);
    while numbers_in(&metrics, "loss").is_empty() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    let signal =
        |signal: &str| Command::new("kill").args([signal, &second.id().to_string()[..]]).status().unwrap();
    assert!(signal("-STOP").success());
    let said = ended(first);
    assert!(said.contains("ranks [1] did not arrive within 3000 ms"), "{said}");
    // The stopped rank has no dump; the other's says for whom it waits, where, and in which step.
    let flight = folder.0.join("run/flight");
    assert!(said.contains(&format!("`flight {}` shows", flight.display())), "{said}");
    let told = phalanx_parallel::flight::explain(&flight).unwrap();
    for wanted in
        ["no dump: rank 1", "rank 0 -> rank 1: ", " in step ", " at train/src/", "last common call: call "]
    {
        assert!(told.contains(wanted), "wanted {wanted:?} in\n{told}");
    }
    // When it goes on, it does not take the others for late.
    assert!(signal("-CONT").success());
    let said = ended(second);
    assert_eq!(said, "with: another process says what went wrong");
}

#[test]
fn a_folder_in_use_is_refused_by_the_name_of_the_process_that_has_it() {
    let folder = Folder::new("locked");
    let out = rank(format!("--out {}", folder.path("run")));
    let mut first = rank(format!("{} --steps 100000000", out.flags)).start(0, 1, free_port());
    let (end, lock) = (Instant::now() + Duration::from_secs(20), folder.0.join("run/.lock"));
    while fs::read_to_string(&lock).unwrap_or_default().is_empty() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    let wanted = format!("is in use by process {} on ", first.id());
    let refused = outcomes(std::slice::from_ref(&out)).remove(0);
    assert!(refused.contains(&wanted), "{refused}");
    // A dead process keeps out none.
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(lock.exists());
    assert_eq!(outcomes(&[out]), ["well"]);
    assert!(!lock.exists());
}

#[test]
fn data_that_differ_in_their_middle_alone_are_refused() {
    let folder = Folder::new("middle");
    let text = |name: &str, change: u16| {
        let mut tokens: Vec<u16> = (0..5000).map(|i| i * 7 % 11).collect();
        tokens[2503] = (tokens[2503] + change) % 11;
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        fs::write(folder.path(name), bytes).unwrap();
    };
    [("a", 0), ("copy", 0), ("b", 1)].into_iter().for_each(|(name, change)| text(name, change));
    let both = rank("--dp 2");
    let of = |name: &str| both.clone().with("TEXT", folder.path(name));
    for (ranks, wanted) in [
        ([both.clone(), both.clone().with("MIDDLE", "")], "the digest of the data is "),
        ([of("a"), of("b")], "(XXH64 of 1 files, 10000 bytes) on rank 0, and "),
    ] {
        for said in outcomes(&ranks) {
            assert!(
                said.contains("the ranks were given different things: ") && said.contains(wanted),
                "{said}"
            );
        }
    }
    assert_eq!(outcomes(&[of("a"), of("copy")]), ["well"; 2]);
    assert_eq!(outcomes(&[of("a"), of("a")]), ["well"; 2]);
}

/// As on machines whose disks have the same paths and other files.
#[test]
fn a_return_to_unlike_checkpoints_is_told_by_every_rank_with_its_step() {
    let folder = Folder::new("return");
    ["a", "b"].iter().for_each(|name| fs::create_dir_all(folder.path(name)).unwrap());
    let of = |name: &str, flags: &str| {
        rank(format!("--dp 2 --out run --lr 1e30 --warmup 0 {flags}")).with("DIRECTORY", folder.path(name))
    };
    let begun = of("a", "--steps 1");
    assert_eq!(outcomes(&[begun.clone(), begun]), ["well"; 2]);
    let flags =
        format!("--steps 4 --save-every 9 --on-divergence rollback --resume {}", folder.path("a/run"));
    for said in outcomes(&[of("a", &flags), of("b", &flags)]) {
        let wanted = "with: step 1: the ranks were given different things: the checkpoint to read is step 1 ";
        assert!(said.starts_with(wanted) && said.contains(" on rank 0, and none ("), "{said}");
    }
}

#[test]
fn what_happens_on_another_machine_is_said_on_this_one_too() {
    let wrong = rank("--dp 2 --out /dev/null/run");
    // Both are on this machine: one says it.
    let said = outcomes(&[wrong.clone(), wrong.clone()]);
    assert!(said[0].contains("rank 0 failed: /dev/null/run: wanted a folder"), "{said:?}");
    assert_eq!(said[1], "with: another process says what went wrong");
    let apart = |local: Rank| local.with("LOCAL_RANK", "0").with("LOCAL_WORLD_SIZE", "1");
    for said in outcomes(&[apart(wrong.clone()), apart(wrong)]) {
        assert_eq!(said.matches("rank 0 failed: /dev/null/run: wanted a folder").count(), 1, "{said}");
    }
}

#[test]
fn a_replay_that_differs_is_told_by_every_rank_and_locks_nothing() {
    let folder = Folder::new("replay");
    let out = folder.path("run");
    let flags = format!("--dp 2 --digests 1 --save-every 1 --keep-last 2 --out {out}");
    assert_eq!(outcomes(&[rank(&flags[..]), rank(&flags[..])]), ["well"; 2]);
    let replay =
        |more: &str| rank(format!("{flags} {more}")).with("REPLAY", format!("{out}/checkpoint-00000001"));
    // As if another process wrote into the folder.
    let path = Path::new(&out).join(".lock");
    let lock = fs::File::create(&path).unwrap();
    lock.lock().unwrap();
    assert_eq!(outcomes(&[replay(""), replay("")]), ["well"; 2]);
    assert!(path.exists());
    drop(lock);
    fs::remove_file(&path).unwrap();
    let other = replay("--clip 0.001");
    for said in outcomes(&[other.clone(), other]) {
        assert!(said.starts_with("unlike: step 1: the first difference is in "), "{said}");
    }
    assert!(!path.exists());
}

/// The system's limit of a file's size, in place of a full disk.
#[test]
#[cfg(target_os = "linux")]
fn a_file_beyond_its_limit_is_an_error_of_its_rank() {
    let folder = Folder::new("quota");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 8; exec \"$0\" child --exact --ignored --nocapture"]);
    command.arg(std::env::current_exe().unwrap()).env("FLAGS", format!("--out {}", folder.path("run")));
    let said = ended(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert!(said.contains("with: ") && said.contains("File too large"), "{said}");
}

#[test]
fn ranks_that_begin_with_different_weights_are_refused_under_every_axis() {
    let folder = Folder::new("weights");
    for (name, seed) in [("a", 1), ("copy", 1), ("b", 2)] {
        let model_of = model().init(&Scope::new(seed, DType::F32, Device::CPU)).unwrap();
        save_model(&model_of, &model(), folder.path(name)).unwrap();
    }
    for layout in ["--tp 2", "--pp 2 --micro-batches 2", "--dp 2"] {
        let of = |name: &str| rank(layout).with("WEIGHTS", folder.path(name));
        for said in outcomes(&[of("a"), of("b")]) {
            assert!(said.contains("the digest of the initial weights is "), "{layout}: {said}");
            assert!(said.contains(" on rank 0, and ") && said.contains(" on rank 1"), "{layout}: {said}");
        }
        assert_eq!(outcomes(&[of("a"), of("copy")]), ["well"; 2]);
    }
}

/// Losses and digests of parameters and gradients, of every step.
#[test]
fn four_ranks_with_tls_train_with_the_bits_of_ranks_without() {
    let folder = Folder::new("tls");
    let wanted = if cfg!(feature = "tls") { "well" } else { "built without its feature `tls`" };
    let lines = ["", "--tls"].map(|tls| {
        let out = folder.path(&format!("run{tls}"));
        let flags = format!("--dp 2 --tp 2 --zero 1 --digests 1 --out {out} {tls}");
        let ranks = [(); 4].map(|()| rank(&flags[..]).with("PHALANX_SECRET", "of these ranks"));
        for said in outcomes(&ranks) {
            let wanted = if tls.is_empty() { "well" } else { wanted };
            assert!(said.contains(wanted), "{said}");
        }
        let metrics = fs::read_to_string(Path::new(&out).join("metrics.jsonl")).unwrap_or_default();
        let digests = metrics.lines().filter_map(|line| line.split_once("\"digests\":"));
        // The last line has what was waited for after them.
        let digests = digests.map(|(_, line)| line.split_once("}}").unwrap().0.to_owned());
        let digests: Vec<String> = digests.collect();
        (digests, numbers_in(&Path::new(&out).join("metrics.jsonl"), "loss"))
    });
    assert_eq!((lines[0].0.len(), lines[0].1.len()), (2, 2));
    if cfg!(feature = "tls") {
        assert_eq!(lines[0], lines[1]);
    }
}
