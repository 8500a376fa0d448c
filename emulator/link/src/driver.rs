//! The emulated driver as the emulated cuBLASLt and NCCL see it: work in stream order, and the devices' memory.
//!
//! Each library has its own statics, so they meet in the process through seven functions that the emulated driver
//! exports under names of its own. It is found by the name that programs load it under, and only if it is loaded
//! already; a driver without these functions is a real one, which these libraries refuse.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};
use std::panic::{self, AssertUnwindSafe};
use std::sync::OnceLock;

use crate::pointer::{Host, c_text};
use libloading::os::unix::{Library, RTLD_NOW};

/// The name under which programs load a CUDA driver.
const NAME: &str = "libcuda.so";
/// `CUDA_ERROR_UNKNOWN`.
const UNKNOWN: i32 = 999;
/// `dlopen` finds only what is loaded already.
const RTLD_NOLOAD: i32 = 4;

/// A range of device memory that an operation reads or writes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The first byte's address.
    pub address: u64,
    /// How many bytes.
    pub bytes: u64,
    /// 1 if they are written, 0 if they are only read.
    pub written: u32,
}

/// What became of an operation that was run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// It has run.
    Done,
    /// It waits for others; the driver will run it again.
    Waiting,
    /// It failed with a driver's status and a reason; the context of its stream is lost, as after a kernel's fault.
    Failed(i32, String),
}

/// [`Progress`] as the driver hears it. A failure is its status, which is positive; its reason goes through
/// `phalanx_driver_explain`.
pub const DONE: i32 = 0;
/// See [`DONE`].
pub const WAITING: i32 = -1;

/// An operation to be run in stream order; again at each launch of a graph that it was captured into.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StreamOperation {
    /// The argument of `run` and `release`.
    pub data: Host,
    /// Called on any thread when the stream has come to the operation, with its ticket: a number that is another one
    /// for each time the operation is queued.
    pub run: extern "C" fn(Host, u64) -> i32,
    /// Called once, when the operation cannot run again.
    pub release: extern "C" fn(Host),
}

type Submit = extern "C" fn(usize, *const c_char, *const Access, usize, StreamOperation) -> i32;
type Read = extern "C" fn(u64, *mut c_void, usize) -> i32;
type Write = extern "C" fn(u64, *const c_void, usize) -> i32;
type Explain = extern "C" fn(*const c_char);
type IsDry = extern "C" fn() -> i32;
type Note = extern "C" fn(*const c_char, *const c_char, u64, u64, u64);
type SetSchedule = extern "C" fn(*const c_char) -> i32;
type Boxed = Box<dyn Fn(u64) -> Progress + Send + Sync>;

/// The emulated driver of this process.
pub struct Driver {
    submit: Submit,
    read: Read,
    write: Write,
    explain: Explain,
    note: Note,
    is_dry: bool,
    schedule: SetSchedule,
    library: Library,
}

impl Driver {
    /// The emulated driver that is loaded in this process.
    ///
    /// # Errors
    /// None is, or the driver that is loaded is another one.
    pub fn loaded() -> Result<&'static Driver, &'static str> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let driver = Driver::open().ok_or("the emulated CUDA driver is not loaded in this process")?;
        Ok(DRIVER.get_or_init(|| driver))
    }

    fn open() -> Option<Driver> {
        // SAFETY: nothing is loaded, so nothing runs: a handle on what is loaded already, or an error.
        let library = unsafe { Library::open(Some(NAME), RTLD_NOW | RTLD_NOLOAD) }.ok()?;
        // SAFETY: functions of these names exist in the emulated driver alone, with these signatures.
        let (submit, read, write, explain, note, is_dry, schedule) = unsafe {
            (
                *library.get::<Submit>(b"phalanx_driver_submit\0").ok()?,
                *library.get::<Read>(b"phalanx_driver_read\0").ok()?,
                *library.get::<Write>(b"phalanx_driver_write\0").ok()?,
                *library.get::<Explain>(b"phalanx_driver_explain\0").ok()?,
                *library.get::<Note>(b"phalanx_driver_note\0").ok()?,
                *library.get::<IsDry>(b"phalanx_driver_is_dry\0").ok()?,
                *library.get::<SetSchedule>(b"phalanx_emulated_driver_schedule\0").ok()?,
            )
        };
        Some(Driver { submit, read, write, explain, note, is_dry: is_dry() != 0, schedule, library })
    }

    /// Queues `work` on a stream, or makes it part of the graph that the stream is captured into.
    ///
    /// # Errors
    /// The driver's status.
    pub fn submit(
        &'static self,
        stream: usize,
        what: &str,
        accesses: &[Access],
        work: impl Fn(u64) -> Progress + Send + Sync + 'static,
    ) -> Result<(), i32> {
        let boxed: Box<Boxed> = Box::new(Box::new(work));
        let work = StreamOperation { data: Host::from_raw(Box::into_raw(boxed).cast()), run, release };
        let what = c_text(what);
        status((self.submit)(stream, what.as_ptr(), accesses.as_ptr(), accesses.len(), work))
    }

    /// Whether the driver executes nothing. Operations are queued and run all the same, and have no data to work on.
    pub fn is_dry(&self) -> bool {
        self.is_dry
    }

    /// What the operation that this thread submits next is, and the bytes that it reads and writes and its floating-point
    /// operations, for the driver's log.
    pub fn note(&self, name: &str, read_bytes: u64, written_bytes: u64, flops: u64) {
        (self.note)(std::ptr::null(), c_text(name).as_ptr(), read_bytes, written_bytes, flops);
    }

    /// Reads device memory. Only for operations while they run.
    ///
    /// # Errors
    /// The driver's status if the range is not in one allocation.
    pub fn read(&self, address: u64, to: &mut [u8]) -> Result<(), i32> {
        status((self.read)(address, to.as_mut_ptr().cast(), to.len()))
    }

    /// Writes device memory. Only for operations while they run.
    ///
    /// # Errors
    /// As [`read`](Driver::read).
    pub fn write(&self, address: u64, from: &[u8]) -> Result<(), i32> {
        status((self.write)(address, from.as_ptr().cast(), from.len()))
    }

    /// Sets the order in which threads of kernels run from now on, as `PHALANX_EMULATOR_SCHEDULE` has it; as the
    /// environment says if it is empty.
    ///
    /// # Errors
    /// The driver's status if the text is not understood.
    pub fn schedule(&self, text: &str) -> Result<(), i32> {
        status((self.schedule)(c_text(text).as_ptr()))
    }

    /// Any other function of the driver, by its C name.
    ///
    /// # Safety
    /// `F` is the type of the function of that name.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.library.get::<F>(format!("{name}\0").as_bytes()) }.ok().map(|symbol| *symbol)
    }
}

fn status(code: i32) -> Result<(), i32> {
    if code == 0 { Ok(()) } else { Err(code) }
}

extern "C" fn run(data: Host, ticket: u64) -> i32 {
    // SAFETY: `submit` made `data` from this type, and `release` has not been called.
    let work = unsafe { &*data.as_ptr().cast::<Boxed>() };
    let bug = |_| Progress::Failed(UNKNOWN, "a bug of the emulator: it panicked, see above".into());
    match panic::catch_unwind(AssertUnwindSafe(|| work(ticket))).unwrap_or_else(bug) {
        Progress::Done => DONE,
        Progress::Waiting => WAITING,
        Progress::Failed(status, text) => {
            if let Ok(driver) = Driver::loaded() {
                (driver.explain)(c_text(&text).as_ptr());
            }
            status.max(1)
        }
    }
}

extern "C" fn release(data: Host) {
    // SAFETY: `submit` made `data` from this type, and this is called once.
    drop(unsafe { Box::from_raw(data.as_ptr().cast::<Boxed>()) });
}
