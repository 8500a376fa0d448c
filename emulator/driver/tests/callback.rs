//! Callbacks of streams: a program learns by them that work is done, whether or not it waits for anything.
//!
//! The mode is read once a process, so each case is a test that is ignored here and run in processes of its own.
#![allow(unsafe_code)]

mod common;

use std::ffi::c_void;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use common::context;
use cudarc::driver::{CudaStream, sys};

/// What the callback of a stream reports, queued behind what the stream has been given so far.
fn callback(stream: &CudaStream) -> Receiver<sys::CUresult> {
    unsafe extern "C" fn send(_: sys::CUstream, status: sys::CUresult, data: *mut c_void) {
        // SAFETY: the pointer made below, once.
        let sender = unsafe { Box::from_raw(data.cast::<Sender<sys::CUresult>>()) };
        sender.send(status).unwrap();
    }
    let (sender, receiver) = channel();
    let data = Box::into_raw(Box::new(sender)).cast();
    // SAFETY: the function takes this pointer.
    unsafe { sys::cuStreamAddCallback(stream.cu_stream(), Some(send), data, 0) }.result().unwrap();
    receiver
}

fn wait(callback: Receiver<sys::CUresult>) -> sys::CUresult {
    callback.recv_timeout(Duration::from_secs(60)).unwrap()
}

/// Runs a case of this file in processes of its own, with streams of every kind.
fn run(case: &str, modes: &[&str]) {
    for streams in modes {
        let ran = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", case, "--ignored", "--nocapture"])
            .env("PHALANX_EMULATOR_STREAMS", streams)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        assert!(said.contains("running 1 test") && ran.status.success(), "{case}, {streams}: {said}");
    }
}

const DEFERRED: [&str; 4] = ["deferred:0", "deferred:1", "deferred:2", "deferred:3"];

#[test]
fn what_a_program_queues_after_a_callback_comes_after_what_was_before_it() {
    run("queues_after_a_callback", &[&["eager"][..], &DEFERRED].concat());
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn queues_after_a_callback() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    for value in 0..20 {
        let x = one.clone_htod(&[value; 16]).unwrap();
        assert_eq!(wait(callback(&one)), sys::CUresult::CUDA_SUCCESS);
        // No event: the callback has told the program. Without it this is a missing wait.
        let y = other.clone_dtod(&x).unwrap();
        assert_eq!(wait(callback(&other)), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(other.clone_dtoh(&y).unwrap(), [value; 16]);
    }
}

#[test]
fn a_callback_learns_that_its_context_is_lost() {
    run("loses_its_context", &DEFERRED);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn loses_its_context() {
    let context = context(0);
    let (one, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = one.clone_htod(&[7_u32; 16]).unwrap();
    // The missing wait, which is found when both copies have run.
    let y = other.clone_dtod(&x).unwrap();
    let event = one.record_event(None).unwrap();
    other.wait(&event).unwrap();
    assert_eq!(wait(callback(&other)), sys::CUresult::CUDA_ERROR_LAUNCH_FAILED);
    std::mem::forget((x, y)); // nothing can be freed any more
}
