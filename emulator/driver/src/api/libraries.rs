//! What the emulated cuBLASLt and NCCL call: work in stream order on the devices' memory. The other side of this is
//! [`phalanx_emulator_link::driver`].

use std::cell::RefCell;

use phalanx_emulator_link::driver::{self, DONE, StreamOperation, WAITING};
use phalanx_emulator_link::pointer::{Bytes, BytesMut, Host, In, Text};

use super::call::{answer, answer_always};
use crate::copy;
use crate::device::{device_of, devices};
use crate::failing;
use crate::log;
use crate::order::{self, KernelOrder};
use crate::queue::{Progress, Task};
use crate::race::Access;
use crate::settings::settings;
use crate::status::{Result, Status, failure, present};
use crate::streams::{context_of, submit};

thread_local! {
    /// Why the work that runs on this thread fails.
    static REASON: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Work of another library; released when nothing can run it any more.
struct ForeignOperation(StreamOperation);

impl ForeignOperation {
    fn run(&self, ticket: u64) -> Progress {
        match (self.0.run)(self.0.data, ticket) {
            DONE => Progress::Done(Vec::new()),
            WAITING => Progress::Waiting,
            status => Progress::Failed(Status(status).because(REASON.take())),
        }
    }
}

impl Drop for ForeignOperation {
    fn drop(&mut self) {
        (self.0.release)(self.0.data);
    }
}

fn submit_foreign(
    stream: usize,
    what: Text,
    accesses: In<driver::Access>,
    count: usize,
    operation: ForeignOperation,
) -> Result<()> {
    let what = present(what.string(), "what")?;
    let touched = accesses.list(count).into_iter().map(|a| Access {
        start: a.address,
        end: a.address + a.bytes,
        written: a.written != 0,
    });
    let context = context_of(stream)?;
    let ranges: Vec<Access> = touched.collect();
    let checked = if settings().dry { ranges.clone() } else { Vec::new() };
    let run = move |ticket| {
        let check = |access: &Access| copy::check(access.start, (access.end - access.start) as usize);
        match checked.iter().try_for_each(check) {
            Ok(()) => operation.run(ticket),
            Err(failure) => Progress::Failed(failure),
        }
    };
    let task = Task::new(what, &context, run).touching(ranges);
    submit(stream, task.with_work(log::noted("library"))).map(|_| ())
}

fn memory(address: u64) -> Result<&'static phalanx_ptx::Memory> {
    let unknown = || Status::ILLEGAL_ADDRESS.because(format!("{address:#x} is no device's address"));
    devices()?;
    device_of(address).map(|device| &device.memory).ok_or_else(unknown)
}

phalanx_emulator_link::export! {
    fn phalanx_emulated_driver_name() -> *const std::ffi::c_char { c"phalanx emulated driver".as_ptr() }
    fn phalanx_emulated_driver_fail_allocation(number: u64) -> u64 { failing::choose(number) }
    fn phalanx_driver_submit(
        stream: usize, what: Text, accesses: In<driver::Access>, count: usize, operation: StreamOperation,
    ) -> i32 {
        let operation = ForeignOperation(operation);
        answer("phalanx_driver_submit", || submit_foreign(stream, what, accesses, count, operation))
    }
    fn phalanx_driver_read(address: u64, to: Host, bytes: usize) -> i32 {
        answer_always("phalanx_driver_read", || {
            let memory = memory(address)?;
            BytesMut::at(to.address(), bytes).write(|out| memory.read(address, out).map_err(|fault| failure(&fault)))
        })
    }
    fn phalanx_driver_write(address: u64, from: Host, bytes: usize) -> i32 {
        answer_always("phalanx_driver_write", || {
            let memory = memory(address)?;
            Bytes::at(from.address(), bytes).read(|data| memory.write(address, data).map_err(|fault| failure(&fault)))
        })
    }
    fn phalanx_driver_is_dry() -> i32 { i32::from(settings().dry) }
    fn phalanx_driver_note(op: Text, name: Text, read_bytes: u64, written_bytes: u64, flops: u64) -> () {
        log::note(op.string(), name.string(), [read_bytes, written_bytes, flops]);
    }
    fn phalanx_driver_take_log() -> *const std::ffi::c_char { log::take() }
    fn phalanx_emulated_driver_schedule(text: Text) -> i32 {
        answer_always("phalanx_emulated_driver_schedule", || {
            let text = present(text.string(), "text")?;
            let wrong = || Status::INVALID_VALUE.because(format!("`{text}` is no order: fixed, SEED or exactly:SEED"));
            let order = if text.is_empty() { None } else { Some(KernelOrder::parse(&text).ok_or_else(wrong)?) };
            order::set(order);
            Ok(())
        })
    }
    fn phalanx_driver_explain(reason: Text) -> () {
        REASON.set(reason.string().unwrap_or_default());
    }
}
