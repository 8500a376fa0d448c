//! Pointers as C hands them over. Each is null or, by the contract of the C function that took it, valid for what
//! its type says for as long as the call lasts; so methods only have to look for null.
//!
//! The types have no constructors for safe code, but for null: they come into being as arguments of exported
//! functions.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Where a result is to be written: `T *`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Whether there is nowhere to write to.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes the result; `None` if the pointer is null.
    #[must_use]
    pub fn set(self, value: T) -> Option<()> {
        self.set_at(0, value)
    }

    /// Writes element `index` of an array that the caller said is long enough.
    #[must_use]
    pub fn set_at(self, index: usize, value: T) -> Option<()> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not null, so by the contract of the exported function valid for as many elements as it is told of.
        unsafe { self.0.add(index).write_unaligned(value) };
        Some(())
    }

    /// What is there before anything is written, for parameters that go both ways.
    pub fn get(self) -> Option<T>
    where
        T: Copy,
    {
        // SAFETY: as in `set_at`; parameters that go both ways are initialised by the caller.
        (!self.0.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }
}

/// A value, or an array, that is read: `const T *`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Nothing: for functions that another takes for one with less parameters.
    pub fn null() -> In<T> {
        In(std::ptr::null())
    }

    /// Whether there is nothing.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The address, for what keeps it.
    pub fn address(self) -> usize {
        self.0 as usize
    }

    /// The value.
    pub fn get(self) -> Option<T> {
        self.at(0)
    }

    /// Element `index` of an array that the caller said is long enough.
    pub fn at(self, index: usize) -> Option<T> {
        // SAFETY: not null, so by the contract of the exported function valid for as many elements as it is told of.
        (!self.0.is_null()).then(|| unsafe { self.0.add(index).read_unaligned() })
    }

    /// The first `count` elements; nothing if the pointer is null.
    pub fn list(self, count: usize) -> Vec<T> {
        (0..count).map_while(|i| self.at(i)).collect()
    }
}

/// A text that ends with a zero: `const char *`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    /// The text's bytes before the zero.
    pub fn bytes(self) -> Option<Vec<u8>> {
        // SAFETY: not null, so by the contract of the exported function a text with a zero at its end.
        (!self.0.is_null()).then(|| unsafe { CStr::from_ptr(self.0) }.to_bytes().to_vec())
    }

    /// The text; what is no UTF-8 is replaced.
    pub fn string(self) -> Option<String> {
        self.bytes().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Any memory of the host: `void *`. An address to keep; reading and writing it later is the business of
/// [`Bytes`] and [`BytesMut`].
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Host(*mut c_void);

impl Host {
    pub(crate) fn from_raw(pointer: *mut c_void) -> Host {
        Host(pointer)
    }

    pub(crate) fn as_ptr(self) -> *mut c_void {
        self.0
    }

    /// Whether there is nothing.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The address.
    pub fn address(self) -> usize {
        self.0 as usize
    }

    /// `count` bytes that lie there now; nothing if the pointer is null.
    pub fn read(self, count: usize) -> Vec<u8> {
        Bytes::at(self.address(), count).to_vec()
    }

    /// A plain value that lies there, as in `void *` parameters whose type depends on another parameter.
    pub fn get<T: Plain>(self) -> Option<T> {
        // SAFETY: not null, so by the contract of the exported function valid for what the other parameter names.
        (!self.0.is_null()).then(|| unsafe { self.0.cast::<T>().read_unaligned() })
    }

    /// Writes a plain value there.
    #[must_use]
    pub fn set<T: Plain>(self, value: T) -> Option<()> {
        // SAFETY: as in `get`.
        (!self.0.is_null()).then(|| unsafe { self.0.cast::<T>().write_unaligned(value) })
    }
}

// SAFETY: an address; only `read`, `get` and `set` follow it, under the contract above.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

/// Numbers that may lie behind a `void *`.
pub trait Plain: Copy {}
impl Plain for i8 {}
impl Plain for u8 {}
impl Plain for i16 {}
impl Plain for u16 {}
impl Plain for i32 {}
impl Plain for u32 {}
impl Plain for i64 {}
impl Plain for u64 {}
impl Plain for f32 {}
impl Plain for f64 {}
impl Plain for usize {}

/// A text for C: zeros within it become spaces.
pub fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// The text at `at` before its zero, if there is one within `bytes_max`.
pub fn text_at(at: Host, bytes_max: usize) -> Option<Vec<u8>> {
    if at.is_null() {
        return None;
    }
    // SAFETY: not null, so by the contract of the exported function a text with a zero at its end; each byte before
    // that is there.
    let length = (0..bytes_max).find(|&i| unsafe { at.0.cast::<u8>().add(i).read() } == 0)?;
    Some(at.read(length))
}

/// Bytes of a page of memory, of the smallest that systems have.
const PAGE: usize = 4096;

/// How many pages are remembered.
const PAGES_MAX: usize = 1 << 12;

thread_local! {
    /// Pages that were memory of this process when this thread looked: arguments lie in the same few ones.
    static PAGES: RefCell<HashSet<usize>> = RefCell::default();
}

/// Reads bytes that may not be there, where a C interface does not say how many its caller has: `false` if some are
/// not memory of this process. Where the system does not show a process its memory, it is read as it is.
pub fn read_checked(address: usize, into: &mut [u8]) -> bool {
    let Some(last) = address.checked_add(into.len().saturating_sub(1)) else { return false };
    let there = into.is_empty() || address != 0 && (address / PAGE..=last / PAGE).all(is_readable);
    if there {
        Bytes::at(address, into.len()).read(|bytes| into.copy_from_slice(bytes));
    }
    there
}

fn is_readable(page: usize) -> bool {
    PAGES.with_borrow_mut(|pages| {
        if pages.contains(&page) {
            return true;
        }
        // Opened anew, since a process that has forked has other memory.
        let Ok(memory) = File::open("/proc/self/mem") else { return true };
        let there = memory.read_exact_at(&mut [0], (page * PAGE) as u64).is_ok();
        if there && pages.len() < PAGES_MAX {
            pages.insert(page);
        }
        there
    })
}

/// Bytes of the host to be read.
#[derive(Debug, Clone, Copy)]
pub struct Bytes {
    address: usize,
    count: usize,
}

impl Bytes {
    /// The `count` bytes at `address`, as a caller of the C interface promised them.
    pub fn at(address: usize, count: usize) -> Bytes {
        Bytes { address, count: if address == 0 { 0 } else { count } }
    }

    /// A copy of what is there now.
    pub fn to_vec(self) -> Vec<u8> {
        self.read(|bytes| bytes.to_vec())
    }

    /// Looks at what is there now.
    pub fn read<R>(self, look: impl FnOnce(&[u8]) -> R) -> R {
        if self.count == 0 {
            return look(&[]);
        }
        // SAFETY: the C interface's caller promises `count` readable bytes there until the operation has run.
        look(unsafe { std::slice::from_raw_parts(self.address as *const u8, self.count) })
    }
}

/// Bytes of the host to be written.
#[derive(Debug, Clone, Copy)]
pub struct BytesMut {
    address: usize,
    count: usize,
}

impl BytesMut {
    /// The `count` bytes at `address`, as a caller of the C interface promised them.
    pub fn at(address: usize, count: usize) -> BytesMut {
        BytesMut { address, count: if address == 0 { 0 } else { count } }
    }

    /// Writes them.
    pub fn write<R>(self, fill: impl FnOnce(&mut [u8]) -> R) -> R {
        if self.count == 0 {
            return fill(&mut []);
        }
        // SAFETY: the C interface's caller promises `count` writable bytes there that it leaves alone until the
        // operation has run.
        fill(unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.count) })
    }
}
