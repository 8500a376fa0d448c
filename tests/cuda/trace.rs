//! `PHALANX_CUDA_TRACE`: the table and the file of a small run, traced as a process of its own.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use phalanx::kernels;
use phalanx::tensor::Result;
use phalanx::tensor::cuda::{Span, Work, start_trace, take_trace};
use phalanx::{Device, Tensor};
use serde_json::Value;

const GPU: Device = Device::Cuda(0);
const FILE: &str = "PHALANX_CUDA_TRACE";
/// The name by which the test starts this program again.
pub const TRACED: &str = "work for a trace";

/// Softmaxes of two widths, a product, and copies either way.
fn work() -> Result<()> {
    let x = Tensor::from_slice(&[0.5f32; 96 * 40], &[96, 40], GPU)?;
    let w = kernels::softmax(&x, 1)?;
    for _ in 0..3 {
        kernels::softmax(&w, 1)?;
    }
    let product = kernels::matmul(&x, &w.transpose(0, 1)?)?;
    kernels::softmax(&product, 1)?.to_vec::<f32>()?;
    Ok(())
}

/// What the other test traces. By itself it proves that tracing is off where nothing asks for it.
pub fn traced() -> std::result::Result<(), String> {
    work().map_err(|e| e.to_string())?;
    let spans = if std::env::var_os(FILE).is_none() { take_trace() } else { Vec::new() };
    if spans.is_empty() { Ok(()) } else { Err(format!("{} spans without a trace", spans.len())) }
}

/// A trace within a program has each kernel, product and copy of the work in its order, none over another.
pub fn spans_are_the_work_in_its_order() -> std::result::Result<(), String> {
    work().map_err(|e| e.to_string())?;
    start_trace();
    let done = work();
    let spans = take_trace();
    done.map_err(|e| e.to_string())?;
    let kind = |span: &Span| match span.work {
        Work::Kernel { source, .. } => format!("{} {}", span.op, source.program),
        Work::Product { size, .. } => format!("{} {size:?}", span.op),
        Work::Copy { how, bytes } => format!("{how} {bytes}"),
        Work::Collective | Work::Graph { .. } => "another".into(),
    };
    let got: Vec<String> = spans.iter().map(kind).collect();
    let softmax = "softmax softmax.cu";
    let product = "matmul [96, 96, 40]";
    let wanted = ["host to device 15360", softmax, softmax, softmax, softmax, product, softmax];
    let back = "device to host 36864";
    if got[..got.len().min(7)] != wanted || !got[7..].iter().any(|kind| kind == back) {
        return Err(format!("got {got:?}, wanted {wanted:?}, {back}"));
    }
    let apart = |pair: &[Span]| pair[0].length >= 0.0 && pair[1].from + 1.0 > pair[0].from + pair[0].length;
    match spans.windows(2).position(|pair| !apart(pair)) {
        Some(at) => Err(format!("{:?} runs over {:?}", spans[at + 1], spans[at])),
        None => Ok(()),
    }
}

/// A launch of a graph is one span, and no work of its capture is one.
pub fn a_graph_is_one_span(steps: impl Fn() -> Result<(), String>) -> std::result::Result<(), String> {
    start_trace();
    let done = steps();
    let spans = take_trace();
    done?;
    let graphs: Vec<u64> = spans
        .iter()
        .filter_map(|span| match span.work {
            Work::Graph { launches } => Some(launches),
            _ => None,
        })
        .collect();
    // The first step of six runs, the second is captured and launched, as are the others.
    let fine = graphs.len() >= 4 && graphs.iter().all(|&launches| launches > 20 && launches == graphs[0]);
    if fine { Ok(()) } else { Err(format!("graphs of {graphs:?} launches")) }
}

/// The table and the file that a process leaves when it ends have the same calls and times.
pub fn a_process_leaves_a_table_and_a_file() -> std::result::Result<(), String> {
    let pattern = std::env::temp_dir().join(format!("phalanx-trace-{}-%p.json", std::process::id()));
    let text = |e: std::io::Error| e.to_string();
    let exe = std::env::current_exe().map_err(text)?;
    let mut command = Command::new(exe);
    command.arg(TRACED).env(FILE, &pattern).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn().map_err(text)?;
    let file = pattern.to_string_lossy().replace("%p", &child.id().to_string());
    let output = child.wait_with_output().map_err(text)?;
    let (table, json) =
        (String::from_utf8_lossy(&output.stderr).into_owned(), std::fs::read_to_string(&file));
    let json = json.map_err(|e| format!("{file}: {e}; {table}"))?;
    let _ = std::fs::remove_file(&file);
    let trace: Value = serde_json::from_str(&json).map_err(|e| e.to_string())?;
    let events = trace.as_array().ok_or("no list of events")?;
    let mut seen: BTreeMap<&str, (u64, f64)> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (calls, time) = seen.entry(event["name"].as_str().unwrap_or_default()).or_default();
        (*calls, *time) = (*calls + 1, *time + event["dur"].as_f64().unwrap_or(f64::NAN));
    }
    let marked = table.contains("an emulator, not a GPU's") == phalanx::tensor::cuda::emulated();
    if !marked || !table.contains(FILE) {
        return Err(format!("the table does not say whose times it has: {table}"));
    }
    let rows: Vec<&str> = table.lines().filter(|line| line.contains('%')).collect();
    for row in &rows {
        // total ms, share, calls, mean, name
        let mut words = row.split_whitespace();
        let mut number = || words.next().and_then(|word| word.trim_end_matches('%').parse::<f64>().ok());
        let [Some(total), Some(_), Some(calls), Some(_)] = [(); 4].map(|()| number()) else {
            return Err(format!("not a row: {row}"));
        };
        let name = row.split("  ").last().unwrap_or_default().trim();
        let Some(&(wanted, time)) = seen.get(name) else { return Err(format!("not in the file: {name:?}")) };
        if calls != wanted as f64 || (total - time / 1e3).abs() > 1e-3 {
            return Err(format!("{name}: {calls} calls of {total} ms, wanted {wanted} of {time} us"));
        }
    }
    let softmaxes: u64 = seen.iter().filter(|(name, _)| name.starts_with("softmax ")).map(|(_, n)| n.0).sum();
    match rows.len() == seen.len() && softmaxes == 5 {
        true => Ok(()),
        false => Err(format!("{} rows for {seen:?}", rows.len())),
    }
}
