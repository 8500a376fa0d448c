//! What kernels ask of memory, held against the bounds of `counters.tsv`: sectors of global memory, bank conflicts of
//! shared memory, and the longest thread, as the emulator counts them while some of the cases run.
//!
//! `PHALANX_WRITE_COUNTERS=1 cargo test -p phalanx-kernels --test cuda counters` writes the file anew. Look at the change
//! before it is committed: a number that has grown is a kernel that has become slower.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use crate::driver::EMULATOR;

/// The cases that are counted, by the beginnings of their names: those whose rows are long enough to tell a kernel's way
/// through memory. Of several cases of a beginning all are counted.
pub const COUNTED: [&str; 37] = [
    "softmax f32 [2, 768]",
    "softmax bf16 [2, 5003]",
    "log_softmax f32 [2, 5003]",
    "layer_norm f32 [2, 768]",
    "layer_norm bf16 [2, 768]",
    "add_layer_norm and add_rms_norm f32 [2, 768]",
    "rms_norm f32 [2, 768]",
    "cross_entropy f32 [2, 9001]",
    "attention bf16 [65, 129, 64, 64] of [3, 3] causal No 0",
    "attention f32 [33, 7, 64, 64] of [3, 1] No 0",
    "product bf16 [33, 17]",
    "product f32 [33, 17]",
    "linear f32",
    "reduce f32 [3, 5001] over [1]",
    "reduce f32 [4, 70, 33] over [1]",
    "optim adamw f32",
    "optim adam bf16",
    "rope f32 33x64",
    "cast f32 to bf16",
    "copy permuted f32 [40, 72] [1, 0] from 1",
    "copy transposed f32 [40, 72]",
    "sum_of_squares f32 of 20000",
    "batch_norm f32 [2, 6, 4, 16] training true",
    "group_norm f16 [2, 4, 33]",
    "random normal f32 [1037]",
    "cumsum f32 [5, 300] along 1",
    "sort f32 [5, 300] along 1",
    "index embedding f32 33x7",
    "index gather f32 along 1",
    "index select f32 along 1",
    "pool max f32",
    "conv f32 (2, 1, [3, 4], [6, 6]",
    "where f32",
    "float gelu tanh f32",
    "float number over f32",
    "recurrence f32 [300, 5]",
    "zeros f32 [40, 72]",
];

/// Set in the process that runs the counted cases alone.
pub const ALONE: &str = "PHALANX_KERNELS_COUNTED_ALONE";
/// The file of the bounds.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cuda/counters.tsv");
const COLUMNS: &str = "kernel\tsectors of those needed\twavefronts a phase\tlongest thread of the mean";
/// How far a figure may be above its bound: they are rounded when they are written.
const ROOM: f64 = 0.006;

/// Figures of a kernel, in the order of [`COLUMNS`]; each is 1 where nothing is lost.
type Figures = [f64; 3];

/// Runs the counted cases under the emulator and holds what they did against the file, or writes it. Whether all is well.
pub fn hold() -> bool {
    let counted = match count() {
        Ok(Some(counted)) => counted,
        Ok(None) => {
            println!("cuda: counters skipped: nothing was counted, for want of a compiler");
            return true;
        }
        Err(why) => {
            println!("  FAILED counters: {why}");
            return false;
        }
    };
    if std::env::var_os("PHALANX_WRITE_COUNTERS").is_some_and(|v| v == "1") {
        let written = std::fs::write(FILE, text(&counted));
        println!("cuda: counters of {} kernels written to {FILE}: {written:?}", counted.len());
        return written.is_ok();
    }
    let bounds = match std::fs::read_to_string(FILE) {
        Ok(text) => parsed(&text, |fields| std::array::from_fn(|i| number(fields, i + 1))),
        Err(error) => {
            println!("  FAILED counters: {FILE}: {error}");
            return false;
        }
    };
    let wrong = above(&counted, &bounds);
    wrong.iter().for_each(|why| println!("  FAILED counters: {why}"));
    println!("cuda: counters of {} kernels, {} above their bounds", counted.len(), wrong.len());
    wrong.is_empty()
}

/// What the counted cases did, by kernel; nothing if they cannot run.
fn count() -> Result<Option<BTreeMap<String, Figures>>, String> {
    let file = std::env::temp_dir().join(format!("phalanx-kernel-counters-{}", std::process::id()));
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    let ran = Command::new(exe)
        .env(EMULATOR.0, EMULATOR.1)
        .env("PHALANX_EMULATOR_COUNTERS", &file)
        // Their results have to be right under the errors of a GPU's approximate instructions too, and wherever memory lies.
        .env("PHALANX_EMULATOR_APPROXIMATE", "1")
        .env("PHALANX_EMULATOR_ADDRESSES", "random:1")
        .env(ALONE, "1")
        .status()
        .map_err(|error| error.to_string())?;
    if !ran.success() {
        return Err("the counted cases do not pass".into());
    }
    let Ok(text) = std::fs::read_to_string(&file) else { return Ok(None) };
    remove(&file);
    let counted = parsed(&text, |fields| {
        let ratio = |a: usize, b: usize| {
            if number(fields, b) == 0.0 { 1.0 } else { number(fields, a) / number(fields, b) }
        };
        [ratio(3, 4), ratio(7, 6), number(fields, 8) * number(fields, 10) / number(fields, 9).max(1.0)]
    });
    Ok(Some(counted).filter(|counted| !counted.is_empty()))
}

fn remove(file: &Path) {
    // A file that stays behind in the folder for such files does no harm.
    let _ = std::fs::remove_file(file);
}

/// The rows of a table behind its first line, by their first field.
fn parsed(text: &str, figures: impl Fn(&[&str]) -> Figures) -> BTreeMap<String, Figures> {
    let rows = text.lines().skip(1).map(|line| line.split('\t').collect::<Vec<_>>());
    rows.map(|fields| (fields[0].to_string(), figures(&fields))).collect()
}

fn number(fields: &[&str], at: usize) -> f64 {
    fields.get(at).and_then(|field| field.parse().ok()).unwrap_or(0.0)
}

fn text(counted: &BTreeMap<String, Figures>) -> String {
    let mut text = format!("{COLUMNS}\n");
    for (kernel, [sectors, wavefronts, longest]) in counted {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{kernel}\t{sectors:.2}\t{wavefronts:.2}\t{longest:.2}");
    }
    text
}

/// Figures above their bounds, and kernels without any.
fn above(counted: &BTreeMap<String, Figures>, bounds: &BTreeMap<String, Figures>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (kernel, found) in counted {
        let Some(bound) = bounds.get(kernel) else {
            wrong
                .push(format!("{kernel} has no line in {FILE}: write it anew with PHALANX_WRITE_COUNTERS=1"));
            continue;
        };
        for ((found, bound), what) in found.iter().zip(bound).zip(COLUMNS.split('\t').skip(1)) {
            if *found > bound + ROOM {
                wrong.push(format!("{kernel}: {found:.2} {what}, and {bound:.2} is the bound"));
            }
        }
    }
    wrong
}

/// Says whether [`above`] finds what it should: this program has no other tests of its own.
pub fn check_itself() {
    let table =
        |rows: &[(&str, Figures)]| rows.iter().map(|(k, f)| (k.to_string(), *f)).collect::<BTreeMap<_, _>>();
    let bounds = table(&[("a.cu f", [1.0, 1.5, 2.0])]);
    assert!(above(&table(&[("a.cu f", [1.0, 1.5, 2.005])]), &bounds).is_empty());
    assert_eq!(above(&table(&[("a.cu f", [1.1, 1.6, 1.0]), ("b.cu g", [1.0; 3])]), &bounds).len(), 3);
    assert_eq!(parsed(&text(&bounds), |f| std::array::from_fn(|i| number(f, i + 1))), bounds);
}
