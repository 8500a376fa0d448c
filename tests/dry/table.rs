//! The table of a workload, as text.

use std::collections::BTreeMap;
use std::fmt::Write;

use phalanx::tensor::cuda::LoggedOperation;

use crate::roofline::{
    Ceilings, Class, Exchange, MACHINES, Machine, PHASES, Timeline, class, collective_share, milliseconds,
    timeline,
};
use crate::workloads::{Recorded, Workload};

/// All operations of one kind, name and operation of the program.
#[derive(Default)]
struct Row {
    launches: usize,
    /// Threads of all blocks.
    threads: u64,
    read: u64,
    written: u64,
    flops: u64,
    ms: [f64; 2],
    computes: bool,
    /// Of the peak.
    share: f64,
}

pub fn table(workload: &Workload, recorded: &Recorded, ceilings: &Ceilings) -> String {
    let mut text = format!(
        "{}.\n\nWritten by `cargo test --test dry -- --write`. Bytes and operations are logged; milliseconds follow from them by\n\
         tests/dry/roofline.rs.\n\n",
        workload.title
    );
    peaks(&mut text, recorded, ceilings);
    let first: Vec<&LoggedOperation> = recorded.logs[2].operations.iter().filter(|o| o.device == 0).collect();
    totals(&mut text, workload, &first, ceilings);
    rows(&mut text, &first, ceilings);
    lanes(&mut text, &first, ceilings);
    text
}

/// Of one GPU what the driver has counted. Several GPUs' host threads allocate and free in an order that differs from run to run, so there
/// it is the order of the timeline that counts.
fn peaks(text: &mut String, recorded: &Recorded, ceilings: &Ceilings) {
    let when = ["model and optimizer", "first step", "later steps"];
    for (n, (when, log)) in when.iter().zip(&recorded.logs).enumerate() {
        let peak = match n {
            _ if recorded.gpus == 1 => log.peak_bytes[0],
            0 => log.used_bytes[0],
            _ => {
                let first: Vec<&LoggedOperation> = log.operations.iter().filter(|o| o.device == 0).collect();
                recorded.logs[n - 1].used_bytes[0]
                    .saturating_add_signed(timeline(&first, &MACHINES[0], ceilings).peak_bytes)
            }
        };
        // Writing to a string does not fail.
        let used = grouped(log.used_bytes[0]);
        let _ = writeln!(text, "bytes, {when:<22} peak {:>16}, afterwards {used:>16}", grouped(peak));
    }
}

fn totals(text: &mut String, workload: &Workload, operations: &[&LoggedOperation], ceilings: &Ceilings) {
    let counted = operations.iter().filter(|o| class(o) != Class::None);
    let flops: u64 = counted.clone().map(|o| o.traffic.flops).sum();
    let of_device = counted.clone().filter(|o| !matches!(class(o), Class::Collective | Class::Transfer));
    let bytes: u64 = of_device.map(|o| o.traffic.read + o.traffic.written).sum();
    let _ = writeln!(text, "operations {}, allocations {}", counted.count(), count(operations, "allocate"));
    let _ = writeln!(text, "device bytes {}, FLOPs {}\n", grouped(bytes), grouped(flops));
    for machine in &MACHINES {
        let line = timeline(operations, machine, ceilings);
        let per_s = 1e3 * workload.tokens as f64 / line.total_ms;
        let share = 100.0 * flops as f64 / (line.total_ms * 1e-3 * machine.tensor);
        let _ = writeln!(
            text,
            "{}: {:.1} ms a step, {per_s:.0} tokens/s, {share:.1} % of peak; kernels {:.1} ms",
            machine.name, line.total_ms, line.compute_ms
        );
        exchanges(text, &line, machine);
    }
}

/// How much of what the GPU exchanges is hidden under its work, and how much is exposed.
fn exchanges(text: &mut String, line: &Timeline, machine: &Machine) {
    if line.exchanges.is_empty() {
        let _ = writeln!(text, "      exchanges nothing");
        return;
    }
    let (mut all, per_s) = (Exchange::default(), machine.link * collective_share() / 1e9);
    let _ = writeln!(
        text,
        "{:>14}{:>9}{:>12}{:>12}{:>12}{:>12}  exchanged at {per_s:.0} GB/s, under kernels of each phase and under none",
        "GB", "ms", PHASES[0], PHASES[1], PHASES[2], "exposed"
    );
    let mut row = |exchange: &Exchange, name: &str| {
        let [forward, backward, update] = exchange.hidden_ms;
        let (gb, ms, exposed) = (exchange.bytes / 1e9, exchange.ms, exchange.exposed_ms());
        let _ = writeln!(
            text,
            "{gb:>14.3}{ms:>9.1}{forward:>12.1}{backward:>12.1}{update:>12.1}{exposed:>12.1}  {name}"
        );
    };
    for (name, exchange) in &line.exchanges {
        row(exchange, name);
        all.bytes += exchange.bytes;
        all.ms += exchange.ms;
        all.hidden_ms.iter_mut().zip(exchange.hidden_ms).for_each(|(sum, ms)| *sum += ms);
    }
    let share = |ms: f64, of: f64| 100.0 * ms / of;
    let (of_all, of_step) = (share(all.exposed_ms(), all.ms), share(all.exposed_ms(), line.total_ms));
    row(&all, &format!("all: {of_all:.1} % of it exposed, {of_step:.1} % of the step"));
}

fn count(operations: &[&LoggedOperation], kind: &str) -> usize {
    operations.iter().filter(|o| o.kind == kind).count()
}

fn rows(text: &mut String, operations: &[&LoggedOperation], ceilings: &Ceilings) {
    let mut rows: BTreeMap<(String, &str, &str), Row> = BTreeMap::new();
    for operation in operations.iter().filter(|o| class(o) != Class::None) {
        let key = (format!("{:?}", class(operation)), operation.op.as_str(), operation.name.as_str());
        let row = rows.entry(key).or_default();
        row.launches += 1;
        row.threads += operation.grid.iter().chain(&operation.block).map(|&n| u64::from(n)).product::<u64>();
        row.read += operation.traffic.read;
        row.written += operation.traffic.written;
        row.flops += operation.traffic.flops;
        for (sum, machine) in row.ms.iter_mut().zip(&MACHINES) {
            let (ms, computes, share) = milliseconds(operation, machine, ceilings);
            *sum += ms;
            (row.computes, row.share) = (row.computes | computes, share);
        }
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|a, b| b.1.ms[0].total_cmp(&a.1.ms[0]).then_with(|| a.0.cmp(&b.0)));
    let [a, b] = MACHINES.each_ref().map(|machine| format!("{} ms", machine.name));
    let _ = writeln!(
        text,
        "\n{a:>9}{b:>9}{:>9}{:>16}{:>20}{:>20}{:>24}  bound    share  class, operation: kernel",
        "launches", "threads", "bytes read", "bytes written", "FLOPs"
    );
    for ((class, op, name), row) in &rows {
        let what = [*op, *name].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(": ");
        let bound = if row.computes { "compute" } else { "memory" };
        let _ = writeln!(
            text,
            "{:>9.3}{:>9.3}{:>9}{:>16}{:>20}{:>20}{:>24}  {bound:<8}{:>6.2}  {class}, {what}",
            row.ms[0],
            row.ms[1],
            row.launches,
            grouped(row.threads),
            grouped(row.read),
            grouped(row.written),
            grouped(row.flops),
            row.share
        );
    }
}

fn lanes(text: &mut String, operations: &[&LoggedOperation], ceilings: &Ceilings) {
    let machine = &MACHINES[0];
    let _ = writeln!(
        text,
        "\nStreams on an {}, by their first operation:\n{:>8}{:>12}{:>12}{:>12}{:>16}{:>16}{:>16}",
        machine.name,
        "stream",
        "operations",
        "begin ms",
        "end ms",
        "kernels ms",
        "collectives ms",
        "host copies ms"
    );
    for (number, lane) in timeline(operations, machine, ceilings).lanes.iter().enumerate() {
        let [compute, links, host] = lane.busy_ms;
        let _ = writeln!(
            text,
            "{number:>8}{:>12}{:>12.2}{:>12.2}{compute:>16.2}{links:>16.2}{host:>16.2}",
            lane.operations, lane.begin_ms, lane.end_ms
        );
    }
}

/// Digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).unwrap_or("")).collect();
    groups.join(",")
}
