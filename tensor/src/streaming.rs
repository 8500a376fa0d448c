//! [`StreamingStores`]: non-temporal stores, which bypass the caches, for results that are larger than the caches. An ordinary store first
//! reads the cache line that it overwrites. So a copy moves three bytes a byte by ordinary stores, and two by streaming stores.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// Bytes of a result from which on streaming stores pay: more than most caches hold.
const BYTES_MIN: usize = 32 << 20;

/// Writes pieces of memory. Until it is dropped other threads may see the old content.
#[derive(Default)]
pub(crate) struct StreamingStores<'a>(PhantomData<&'a mut [u8]>);

impl<'a> StreamingStores<'a> {
    /// Whether a result of so many bytes is written faster by streaming stores.
    pub(crate) fn pay(bytes: usize) -> bool {
        cfg!(target_arch = "x86_64") && bytes >= BYTES_MIN
    }

    /// Copies `from` into `to`. This is quickest where `to` fills whole cache lines.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline(always)]
    pub(crate) fn put(&mut self, to: &'a mut [u8], from: &[u8]) {
        assert_eq!(to.len(), from.len());
        copy(to, from);
    }
}

impl Drop for StreamingStores<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: SSE is part of the architecture. The fence orders streaming stores with the stores that follow.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        unsafe {
            std::arch::x86_64::_mm_sfence()
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))] // Miri knows no such stores
#[inline(always)]
fn copy(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

    // SAFETY: any bytes are a vector.
    let (head, body, tail) = unsafe { to.align_to_mut::<__m128i>() };
    let (before, from) = from.split_at(head.len());
    let (vectors, after) = from.split_at(size_of_val(body));
    head.copy_from_slice(before);
    for (to, from) in body.iter_mut().zip(vectors.chunks_exact(size_of::<__m128i>())) {
        // SAFETY: SSE2 is part of the architecture; `to` is aligned, and `from` has a vector's bytes.
        unsafe { _mm_stream_si128(to, _mm_loadu_si128(from.as_ptr().cast())) }
    }
    tail.copy_from_slice(after);
}

/// Prefetches the cache line at `address`, which need not be valid. A hint: it may do nothing.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the architecture, and a prefetch never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    let _ = address;
}

#[cfg(any(not(target_arch = "x86_64"), miri))]
fn copy(to: &mut [u8], from: &[u8]) {
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::StreamingStores;

    #[test]
    fn every_byte_comes_to_its_place_and_no_other_changes() {
        let from: Vec<u8> = (0..300).map(|i| (i * 7 % 251) as u8).collect();
        for start in 0..20 {
            for len in [0, 1, 15, 16, 17, 63, 64, 65, 250] {
                let mut to = vec![255; 300];
                let (first, second) = to[start..start + len].split_at_mut(len / 2);
                let mut stores = StreamingStores::default();
                stores.put(second, &from[len / 2..len]);
                stores.put(first, &from[..len / 2]);
                drop(stores);
                assert_eq!(to[start..start + len], from[..len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&x| x == 255));
            }
        }
    }
}
