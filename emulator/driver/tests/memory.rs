//! Allocations, copies and fills through cudarc's safe interface.
#![allow(unsafe_code)]

mod common;

use common::{context, status, stream};
use cudarc::driver::{result, sys};

#[test]
fn a_vector_comes_back_as_it_was_sent() {
    let stream = stream();
    let values: Vec<f32> = (0..1000).map(|i| i as f32 * 0.5).collect();
    let on_device = stream.clone_htod(&values).unwrap();
    let copy = stream.clone_dtod(&on_device).unwrap();
    assert_eq!(stream.clone_dtoh(&copy).unwrap(), values);
}

#[test]
fn zeros_are_zeros() {
    let stream = stream();
    let zeros = stream.alloc_zeros::<u32>(100).unwrap();
    assert_eq!(stream.clone_dtoh(&zeros).unwrap(), vec![0; 100]);
}

#[test]
fn pinned_memory_is_copied_both_ways() {
    let stream = stream();
    // SAFETY: it is filled before it is read.
    let mut pinned = unsafe { stream.context().alloc_pinned_with_flags::<u64>(64, 0) }.unwrap();
    pinned.as_mut_slice().unwrap().iter_mut().enumerate().for_each(|(i, x)| *x = i as u64);
    let on_device = stream.clone_htod(&pinned).unwrap();
    // SAFETY: as above.
    let mut back = unsafe { stream.context().alloc_pinned_with_flags::<u64>(64, 0) }.unwrap();
    stream.memcpy_dtoh(&on_device, &mut back).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(back.as_slice().unwrap(), pinned.as_slice().unwrap());
}

#[test]
fn devices_copy_to_each_other() {
    let (one, other) = (context(0).new_stream().unwrap(), context(1).new_stream().unwrap());
    let from = one.clone_htod(&[1_u8, 2, 3, 4]).unwrap();
    one.synchronize().unwrap();
    let mut to = other.alloc_zeros::<u8>(4).unwrap();
    other.memcpy_dtod(&from, &mut to).unwrap();
    assert_eq!(other.clone_dtoh(&to).unwrap(), [1, 2, 3, 4]);
}

#[test]
fn free_memory_is_what_is_not_allocated() {
    let stream = stream();
    let (before, total) = result::mem_get_info().unwrap();
    assert_eq!(total, 16 << 30);
    // Other tests allocate a few KiB meanwhile.
    let large = stream.alloc_zeros::<u8>(64 << 20).unwrap();
    stream.synchronize().unwrap();
    let (while_there, _) = result::mem_get_info().unwrap();
    assert!((63 << 20..=65 << 20).contains(&(before - while_there)), "{before} {while_there}");
    drop(large);
    stream.synchronize().unwrap();
    assert!(result::mem_get_info().unwrap().0 > while_there + (63 << 20));
}

#[test]
fn more_than_the_device_has_is_out_of_memory() {
    let stream = stream();
    // SAFETY: nothing reads it.
    let refused = unsafe { stream.alloc::<u8>(17 << 30) };
    assert_eq!(status(refused), sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
}

#[test]
fn a_copy_beyond_an_allocation_is_refused() {
    let stream = stream();
    let small = stream.alloc_zeros::<u8>(16).unwrap();
    let (address, _guard) = cudarc::driver::DevicePtr::device_ptr(&small, &stream);
    let mut out = [0_u8; 32];
    // SAFETY: the driver checks the range.
    let refused = unsafe { result::memcpy_dtoh_sync(&mut out, address) };
    assert_eq!(status(refused), sys::CUresult::CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn a_pool_says_which_devices_may_use_its_memory() {
    let _context = context(0);
    let flags = |ordinal| {
        let (mut flags, mut there) = (sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ, at(ordinal));
        // SAFETY: device 0 exists, and so does its pool; both places are there to be read and written.
        unsafe {
            let pool = result::device::get_default_mem_pool(0).unwrap();
            sys::cuMemPoolGetAccess(&raw mut flags, pool, &raw mut there).result().unwrap();
        }
        flags
    };
    let set = |ordinal, flags| {
        let wish = sys::CUmemAccessDesc { location: at(ordinal), flags };
        // SAFETY: as above.
        unsafe {
            let pool = result::device::get_default_mem_pool(0).unwrap();
            sys::cuMemPoolSetAccess(pool, &raw const wish, 1).result()
        }
    };
    use sys::CUmemAccess_flags as F;
    let none = F::CU_MEM_ACCESS_FLAGS_PROT_NONE;
    let all = F::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    assert_eq!((flags(0), flags(1)), (all, none));
    set(1, all).unwrap();
    assert_eq!(flags(1), all);
    set(1, none).unwrap();
    assert_eq!(flags(1), none);
    assert_eq!(set(0, none).unwrap_err().0, sys::CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(set(99, all).unwrap_err().0, sys::CUresult::CUDA_ERROR_INVALID_DEVICE);
}

fn at(ordinal: i32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal }
}
