//! Tensors, views, and writes in place.

use phalanx::kernels::{
    accumulate_, add_scaled_, copy_, fill_, full, matmul_accumulate_, matmul_into, random, scale_,
};
use phalanx::tensor::{RngKey, Window};
use phalanx::{DType, Device, Tensor};

use crate::{Mistake, mistakes, zeros};

fn f(shape: &[usize]) -> Tensor {
    zeros(shape, DType::F32)
}

/// A view of four elements, two of which are the same in memory.
fn folded() -> Tensor {
    f(&[4]).as_strided(&[2, 2], &[1, 1], 0).unwrap()
}

fn spread() -> Tensor {
    f(&[1]).broadcast_to(&[3]).unwrap()
}

fn drawn(range: [f64; 2]) -> phalanx::tensor::Result<Tensor> {
    random::uniform(&[2], &Window::whole(&[2]), RngKey::default().site(0), range, DType::F32, Device::CPU)
}

fn normal(std: f64, dtype: DType) -> phalanx::tensor::Result<Tensor> {
    random::normal(&[2], &Window::whole(&[2]), RngKey::default().site(0), [0.0, std], dtype, Device::CPU)
}

pub fn mistakes() -> Vec<Mistake> {
    let mut all = made_and_viewed();
    all.extend(written());
    all
}

fn made_and_viewed() -> Vec<Mistake> {
    mistakes! {
        "from_slice: | 3 values | [2, 2] | 4 values" => Tensor::from_slice(&[1f32, 2.0, 3.0], &[2, 2], Device::CPU);
        "from_slice: | [9223372036854775807, 4]" => Tensor::from_slice(&[1f32], &[i64::MAX as usize, 4], Device::CPU);
        "zeros: | [9223372036854775807, 4] | 2^63" => Tensor::zeros(&[i64::MAX as usize, 4], DType::F32, Device::CPU);
        "zeros: | could not allocate | in use there" => Tensor::zeros(&[1 << 48], DType::F32, Device::CPU);
        "empty: | could not allocate" => Tensor::empty(&[1 << 48], DType::F32, Device::CPU);
        "device: | cpu:5000 | below 1024" => Tensor::zeros(&[1], DType::F32, Device::Cpu(5000));
        "full: | 300 | u8 | 0 to 255" => full(&[2], 300, DType::U8, Device::CPU);
        "full: | NaN | i32 | integer" => full(&[2], f64::NAN, DType::I32, Device::CPU);
        "full: | 1.5 | i64 | integer" => full(&[2], 1.5, DType::I64, Device::CPU);
        "narrow: | 2 elements from 3 | size 4" => f(&[4]).narrow(0, 3, 2);
        "narrow: | from 18446744073709551615" => f(&[4]).narrow(0, usize::MAX, 2);
        "slice: | step of 0" => f(&[4]).slice(0, 0, 4, 0);
        "slice: | dimension 1" => f(&[4]).slice(1, 0, 4, 1);
        "select: | 4 | below 4" => f(&[4]).select(0, 4);
        "i: | 3 dimensions | at most 2" => f(&[2, 2]).i((0, 0, 0));
        "select: | 2 | below 2" => f(&[2, 2]).i(2);
        "permute: | [0, 0] | permutation" => f(&[2, 2]).permute(&[0, 0]);
        "broadcast_to: | [2] | [3]" => f(&[2]).broadcast_to(&[3]);
        "broadcast_to: | [1]" => f(&[1]).broadcast_to(&[usize::MAX, 2]);
        "unsqueeze: | dimension 3" => f(&[2]).unsqueeze(3);
        "squeeze: | dimension 3" => f(&[2]).squeeze(3);
        "reshape: | [4] | [3]" => f(&[4]).reshape(&[3]);
        "as_strided: | [3] | 4 elements" => f(&[4]).as_strided(&[3], &[2], 0);
        "as_strided: | strides [1]" => f(&[4]).as_strided(&[2, 2], &[1], 0);
        "view_into: | strides | contiguous" => f(&[2, 2]).transpose(0, 1).unwrap().view_into(0, &[2]);
        "narrow: | 3 elements from 2" => f(&[4]).view_into(2, &[3]);
        "split_at: | 5 | at most 4" => f(&[4]).split_at(0, 5);
        "chunk: | 0 chunks" => f(&[4]).chunk(0, 0);
        "size: | dimension 4" => f(&[4]).size(4);
        "to_vec: | f32 | i64" => f(&[4]).to_vec::<i64>();
        "read: | f32 | f64" => f(&[4]).read::<f64>("read").map(drop);
        "uniform: | 2.0 to 1.0 | lower one first" => drawn([2.0, 1.0]);
        "uniform: | NaN" => drawn([f64::NAN, 1.0]);
        "normal: | -1 | 0 or more" => normal(-1.0, DType::F32);
        "normal: | i64 | floating-point" => normal(1.0, DType::I64);
    }
}

fn written() -> Vec<Mistake> {
    mistakes! {
        "copy: | overlaps itself | [2, 2] | [1, 1]" => copy_(&mut folded(), &f(&[2, 2]));
        "copy: | overlaps itself" => copy_(&mut spread(), &f(&[3]));
        "copy: | [3] | [4]" => copy_(&mut f(&[4]), &f(&[3]));
        "copy: | cpu:0 | cpu:7" => copy_(&mut f(&[4]), &Tensor::zeros(&[4], DType::F32, Device::Cpu(7)).unwrap());
        "copy_from: | strides | contiguous" => spread().copy_from(&f(&[3]));
        "copy_from: | [3] | [4]" => f(&[4]).copy_from(&f(&[3]));
        "copy_from: | f64 | f32" => f(&[3]).copy_from(&zeros(&[3], DType::F64));
        "fill: | overlaps itself" => fill_(&mut spread(), 1);
        "fill: | 300 | u8" => fill_(&mut zeros(&[2], DType::U8), 300);
        "fill: | -1 | u8" => fill_(&mut zeros(&[2], DType::U8), -1);
        "accumulate: | overlaps itself" => accumulate_(&mut spread(), &f(&[3]));
        "accumulate: | [2] | [3]" => accumulate_(&mut f(&[3]), &f(&[2]));
        "accumulate: | i64 | floating-point" => accumulate_(&mut zeros(&[3], DType::I64), &f(&[3]));
        "add_scaled: | overlaps itself" => add_scaled_(&mut folded(), &f(&[2, 2]), 2.0);
        "scale: | overlaps itself" => scale_(&mut spread(), 2.0);
        "scale: | i64 | floating-point" => scale_(&mut zeros(&[3], DType::I64), 2.0);
        "matmul_into: | [3, 3] | [2, 2]" => matmul_into(&mut f(&[3, 3]), &f(&[2, 4]), &f(&[4, 2]));
        "matmul_into: | strides | contiguous" => matmul_into(&mut folded(), &f(&[2, 4]), &f(&[4, 2]));
        "matmul_accumulate: | f64 | f32" => matmul_accumulate_(&mut zeros(&[2, 2], DType::F64), &f(&[2, 4]), &f(&[4, 2]));
    }
}
