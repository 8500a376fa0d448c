//! [`Mpi`]: a wire of MPI's messages between pairs. MPI adds nothing up here, so sums keep their order.
//!
//! All of MPI is called on the thread that makes the wire, and nothing blocks. A receive begins when a matched probe
//! has found a message and its size, so nothing is agreed on beforehand.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use mpi_sys as sys;

use super::Wire;
use crate::comm::{Error, Result};

/// MPI counts in ints: a longer message goes in pieces of this size, the last one shorter.
const PIECE: usize = 1 << 30;
/// The one tag: the addresses are in the messages.
const TAG: c_int = 1;

/// Whether this process has had its one session of MPI.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// MPI, from its initialization to its end.
pub(crate) struct Mpi {
    /// On their way out.
    sends: Vec<Transfer>,
    /// On their way in, in order of their probes, which is the order of each sender.
    receives: VecDeque<(usize, Transfer)>,
    /// Pieces of messages that are not complete, by sender.
    partial: Vec<Vec<u8>>,
    /// The one that may call MPI.
    thread: ThreadId,
}

/// Bytes that MPI reads or writes until the request is done.
struct Transfer {
    request: sys::MPI_Request,
    bytes: Vec<u8>,
}

// SAFETY: a `Wire` is `Send` so that it can be boxed as one; this one is made, used and dropped by the driver's thread,
// which every call of MPI asserts. MPI's handles mean the same on every thread, and moving a `Vec` does not move
// its bytes.
unsafe impl Send for Mpi {}

impl Mpi {
    /// Initializes MPI on this thread, as the rank that its launcher said this process is.
    pub(crate) fn new((rank, size): (usize, usize)) -> Result<Mpi> {
        if BEGUN.swap(true, Ordering::SeqCst) {
            return Err(Error::Launch("MPI can be begun only once in a process".into()));
        }
        let (mut provided, mut is) = (0, (0, 0));
        // SAFETY: the first call of MPI in this process, by the thread that makes all others; null arguments are
        // allowed since MPI 2, and the out pointers are to live ints.
        let code = unsafe {
            sys::MPI_Init_thread(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                sys::RSMPI_THREAD_FUNNELED,
                &mut provided,
            )
        };
        check(code)?;
        // SAFETY: MPI is initialized, the communicator is its own, the out pointers are to live ints.
        unsafe {
            check(sys::MPI_Comm_set_errhandler(sys::RSMPI_COMM_WORLD, sys::RSMPI_ERRORS_RETURN))?;
            check(sys::MPI_Comm_rank(sys::RSMPI_COMM_WORLD, &mut is.0))?;
            check(sys::MPI_Comm_size(sys::RSMPI_COMM_WORLD, &mut is.1))?;
        }
        if (is.0 as usize, is.1 as usize) != (rank, size) {
            let why = format!("MPI says rank {} of {}, the environment rank {rank} of {size}", is.0, is.1);
            return Err(Error::Launch(why));
        }
        let thread = std::thread::current().id();
        Ok(Mpi { sends: vec![], receives: VecDeque::new(), partial: vec![vec![]; size], thread })
    }

    fn assert_thread(&self) {
        assert_eq!(std::thread::current().id(), self.thread, "MPI belongs to the thread that began it");
    }

    /// Begins to send one piece.
    fn post(&mut self, to: usize, bytes: Vec<u8>) -> Result<()> {
        // SAFETY: null is MPI's own value for no request, and a plain handle.
        let mut transfer = Transfer { request: unsafe { sys::RSMPI_REQUEST_NULL }, bytes };
        let (start, count) = (transfer.bytes.as_ptr().cast(), transfer.bytes.len() as c_int);
        // SAFETY: the bytes belong to the transfer, which is kept until the request is done (or leaked, in `drop`), and
        // no thread writes them; the count is at most `PIECE`.
        let code = unsafe {
            let (kind, world) = (sys::RSMPI_UINT8_T, sys::RSMPI_COMM_WORLD);
            sys::MPI_Isend(start, count, kind, to as c_int, TAG, world, &mut transfer.request)
        };
        check(code).map_err(|error| lost(to, &error))?;
        self.sends.push(transfer);
        Ok(())
    }

    /// Begins to receive the messages that have come.
    fn probe(&mut self) -> Result<()> {
        loop {
            let (mut flag, mut count) = (0, 0);
            // SAFETY: a status is plain old data, of which MPI writes what is read here.
            let mut status: sys::MPI_Status = unsafe { std::mem::zeroed() };
            // SAFETY: plain handles of MPI's own.
            let (mut message, null) = unsafe { (sys::RSMPI_MESSAGE_NULL, sys::RSMPI_REQUEST_NULL) };
            // SAFETY: the out pointers are to live variables of their types.
            let code = unsafe {
                let (any, world) = (sys::RSMPI_ANY_SOURCE, sys::RSMPI_COMM_WORLD);
                sys::MPI_Improbe(any, TAG, world, &mut flag, &mut message, &mut status)
            };
            check(code)?;
            if flag == 0 {
                return Ok(());
            }
            // SAFETY: the probe has filled the status.
            check(unsafe { sys::MPI_Get_count(&status, sys::RSMPI_UINT8_T, &mut count) })?;
            let mut transfer = Transfer { request: null, bytes: vec![0; count as usize] };
            let start = transfer.bytes.as_mut_ptr().cast();
            // SAFETY: the message is the one just matched; the bytes belong to the transfer, which is kept until the
            // request is done (or leaked, in `drop`), and are as many as the message has.
            let code = unsafe {
                sys::MPI_Imrecv(start, count, sys::RSMPI_UINT8_T, &mut message, &mut transfer.request)
            };
            check(code)?;
            self.receives.push_back((status.MPI_SOURCE as usize, transfer));
        }
    }
}

impl Transfer {
    fn is_done(&mut self) -> Result<bool> {
        let mut flag = 0;
        // SAFETY: the request is this transfer's, and null once it is done, which MPI takes for done.
        check(unsafe { sys::MPI_Test(&mut self.request, &mut flag, sys::RSMPI_STATUS_IGNORE) })?;
        Ok(flag != 0)
    }
}

/// The loss of a rank with which MPI cannot exchange a message. Most MPIs end all processes before they say so.
fn lost(rank: usize, error: &Error) -> Error {
    Error::Lost { rank, why: error.to_string() }
}

/// MPI's errors as ours.
fn check(code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let (mut text, mut length) = (vec![0; 1 << 12], 0);
    // SAFETY: the text is longer than any MPI's MPI_MAX_ERROR_STRING, the length's pointer is to a live int.
    unsafe { sys::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let text = String::from_utf8_lossy(&text[..length.max(0) as usize]).into_owned();
    Err(Error::Launch(format!("MPI: {text}")))
}

impl Wire for Mpi {
    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<()> {
        self.assert_thread();
        // A piece of full size says that more follow.
        if message.len() < PIECE {
            return self.post(to, message);
        }
        let whole = message.len() / PIECE * PIECE;
        message[..whole].chunks(PIECE).try_for_each(|piece| self.post(to, piece.to_vec()))?;
        self.post(to, message[whole..].to_vec())
    }

    fn poll(&mut self) -> Result<Option<(usize, Vec<u8>)>> {
        self.assert_thread();
        self.is_flushed();
        self.probe()?;
        let Some((from, first)) = self.receives.front_mut() else { return Ok(None) };
        if !first.is_done().map_err(|error| lost(*from, &error))? {
            return Ok(None);
        }
        let Some((from, transfer)) = self.receives.pop_front() else { return Ok(None) };
        if self.partial[from].is_empty() && transfer.bytes.len() < PIECE {
            return Ok(Some((from, transfer.bytes)));
        }
        self.partial[from].extend_from_slice(&transfer.bytes);
        match transfer.bytes.len() < PIECE {
            true => Ok(Some((from, std::mem::take(&mut self.partial[from])))),
            false => self.poll(),
        }
    }

    fn is_polled(&self) -> bool {
        true
    }

    fn is_flushed(&mut self) -> bool {
        self.assert_thread();
        // One that MPI cannot test stays, and with it its bytes; the driver gives up on it in the end.
        self.sends.retain_mut(|transfer| !transfer.is_done().unwrap_or(false));
        self.sends.is_empty()
    }

    fn close(&mut self, orderly: bool) {
        self.assert_thread();
        if orderly {
            // SAFETY: the last call of MPI, on its thread; all requests are done.
            unsafe { sys::MPI_Finalize() };
        }
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // MPI may still read or write what is under way after a failure: it keeps those bytes.
        let receives = self.receives.drain(..).map(|(_, transfer)| transfer);
        self.sends.drain(..).chain(receives).for_each(std::mem::forget);
    }
}
