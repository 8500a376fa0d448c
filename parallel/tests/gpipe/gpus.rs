//! All these tests once more on CUDA devices, two to four of them a pipeline: of a GPU's driver, else of the emulator, which runs its
//! streams in random orders that only waits restrict.

use std::process::{Command, Output};

use phalanx_tensor::Device;
use phalanx_tensor::cuda::{Library, emulated, require};

use crate::kit::ON_GPUS;

/// Each test has devices of its own.
const SETTINGS: [(&str, &str); 2] = [("PHALANX_CUDA_DEVICES", "1000"), (ON_GPUS, "1")];
const EMULATOR: [(&str, &str); 2] = [("PHALANX_CUDA", "emulator"), ("PHALANX_EMULATED_DEVICES", "4")];
const STREAMS: &str = "PHALANX_EMULATOR_STREAMS";
const ORDERS: [&str; 2] = ["deferred:1", "deferred:2"];

/// Tests that are left out, with the reason.
const LEFT: [(&str, &str); 4] = [
    ("all_of_this_holds", "starts these tests"),
    ("two_equal_stages", "stages that sleep or compute on the host"),
    (
        "no_stage_is_more_than_three_micro_batches_ahead",
        "of how far the host is ahead, by times of two devices",
    ),
    ("a_meta_device_has_the_peaks_of_a_cpu", "of no GPU"),
];
/// Tests whose stages sleep on the host. A device's times are the host's only where its streams run at once.
const OF_HOST_TIMES: [&str; 2] = [
    "a_stage_recomputes_while_its_gradient_is_on_the_way",
    "the_observer_hears_of_every_phase_of_every_cell_once",
];
/// Of times for which the emulator must run nothing else.
const ALONE: &str = "layers_are_balanced_by_what_the_gpu_computes";
/// Convolutions that take the emulator minutes. The same layers run in tests of their bits.
const LONG: &str = "norms_are_torchgpipes";

/// These tests with other settings: those that are named, or all but those that are left out.
fn again(settings: &[(&str, &str)], named: &[&str], left: &[&str]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--include-ignored", "--test-threads", "4"]).args(named);
    for name in LEFT.iter().map(|(name, _)| name).chain(left) {
        command.args(["--skip", name]);
    }
    command.envs(SETTINGS).envs(settings.iter().copied()).output().unwrap()
}

fn assert_passed(order: &str, tests: usize, output: &Output) {
    let [text, said] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{order}:\n{text}\n{said}");
    let passed = text.split(" passed").next().and_then(|text| text.rsplit(' ').next()?.parse::<usize>().ok());
    assert!(passed.is_some_and(|passed| passed >= tests), "{order}:\n{text}");
    println!("{order}: {}", text.lines().rfind(|line| !line.is_empty()).unwrap_or_default());
}

#[test]
fn all_of_this_holds_on_cuda_devices_in_every_order_of_their_streams() {
    if let Err(why) = require(Library::Nvrtc) {
        println!("not tried on CUDA devices: {why}");
        return;
    }
    if !emulated() && Device::Cuda(0).gpu().is_ok() {
        return assert_passed("a GPU's driver", 60, &again(&[], &[], &OF_HOST_TIMES));
    }
    let in_order = |order| [&EMULATOR[..], &[(STREAMS, order)]].concat();
    assert_passed("eager", OF_HOST_TIMES.len(), &again(&in_order("eager"), &OF_HOST_TIMES, &[]));
    assert_passed("alone", 1, &again(&in_order(ORDERS[0]), &[ALONE], &[]));
    for order in ORDERS {
        let left = [&OF_HOST_TIMES[..], &[ALONE, LONG]].concat();
        assert_passed(order, 60, &again(&in_order(order), &[], &left));
    }
}
