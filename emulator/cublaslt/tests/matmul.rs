//! Products in every type, shape and place, held against a plain triple loop in f64.
#![allow(unsafe_code)]

mod common;

use std::time::Instant;

use common::{Matrix, Product, stream, values};
use cudarc::cublaslt::sys::{
    cublasComputeType_t as Compute, cublasLtMatmulDescAttributes_t as Attribute, cublasStatus_t as Status,
    cudaDataType_t as Kind,
};
use cudarc::cublaslt::{CudaBlasLT, Matmul, MatmulConfig};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, sys};
use half::{bf16, f16};

/// The bytes of values in a type.
fn bytes(kind: Kind, values: &[f64]) -> Vec<u8> {
    let one = |x: &f64| match kind {
        Kind::CUDA_R_64F => x.to_le_bytes().to_vec(),
        Kind::CUDA_R_32F => (*x as f32).to_le_bytes().to_vec(),
        Kind::CUDA_R_16F => f16::from_f64(*x).to_le_bytes().to_vec(),
        _ => bf16::from_f64(*x).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(one).collect()
}

fn numbers(kind: Kind, bytes: &[u8]) -> Vec<f64> {
    match kind {
        Kind::CUDA_R_64F => bytes.chunks(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
        Kind::CUDA_R_32F => {
            bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect()
        }
        Kind::CUDA_R_16F => {
            bytes.chunks(2).map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f64()).collect()
        }
        _ => bytes.chunks(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f64()).collect(),
    }
}

fn address(slice: &CudaSlice<u8>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}

/// A product of whole numbers: every type has it exactly.
fn check(compute: Compute, inputs: Kind, outputs: Kind, transposed: [bool; 2], batches: usize) {
    let stream = stream();
    let (m, n, k) = (37, 19, 23);
    let shape =
        |rows: usize, columns: usize, turned: bool| if turned { (columns, rows) } else { (rows, columns) };
    let matrix = |kind, (rows, columns): (usize, usize)| {
        let (leading, batches) = (rows + 3, batches as i32);
        Matrix {
            leading,
            batches,
            batch_stride: (leading * columns) as i64,
            ..Matrix::new(kind, rows, columns)
        }
    };
    let a = matrix(inputs, shape(m, k, transposed[0]));
    let b = matrix(inputs, shape(k, n, transposed[1]));
    let d = matrix(outputs, (m, n));
    let data = |x: &Matrix, seed| values(batches * x.batch_stride as usize, seed);
    let (va, vb, vc) = (data(&a, 1), data(&b, 2), data(&d, 3));
    let send = |kind, values: &[f64]| stream.clone_htod(&bytes(kind, values)).unwrap();
    let (da, db, dc) = (send(inputs, &va), send(inputs, &vb), send(outputs, &vc));
    let dd = send(outputs, &vec![77.0; vc.len()]);
    let double = inputs == Kind::CUDA_R_64F;
    let scale = if double { Kind::CUDA_R_64F } else { Kind::CUDA_R_32F };
    let product = Product::new(compute, scale, [a, b, d, d]).transposed(transposed[0], transposed[1]);
    let at = [&da, &db, &dc, &dd].map(|slice| address(slice, &stream));
    if double {
        product.run(&stream, [2.0_f64, -1.0], at).unwrap();
    } else {
        product.run(&stream, [2.0_f32, -1.0], at).unwrap();
    }
    let got = numbers(outputs, &stream.clone_dtoh(&dd).unwrap());
    let element = |values: &[f64], x: &Matrix, batch: usize, (row, column): (usize, usize)| {
        values[batch * x.batch_stride as usize + column * x.leading + row]
    };
    for batch in 0..batches {
        for j in 0..n {
            for i in 0..d.leading {
                let at = batch * d.batch_stride as usize + j * d.leading + i;
                if i >= m {
                    assert_eq!(got[at], 77.0, "what lies between the columns of D is left alone");
                    continue;
                }
                let product = |p| {
                    element(&va, &a, batch, shape(i, p, transposed[0]))
                        * element(&vb, &b, batch, shape(p, j, transposed[1]))
                };
                let wanted = 2.0 * (0..k).map(product).sum::<f64>() - element(&vc, &d, batch, (i, j));
                let wanted = numbers(outputs, &bytes(outputs, &[wanted]))[0];
                assert_eq!(
                    got[at], wanted,
                    "{inputs:?} to {outputs:?}, {transposed:?}, batch {batch}, ({i}, {j})"
                );
            }
        }
    }
}

#[test]
fn all_types_transpositions_and_batches_agree_with_the_triple_loop() {
    use Kind::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F, CUDA_R_64F};
    let types = [
        (Compute::CUBLAS_COMPUTE_64F, CUDA_R_64F, CUDA_R_64F),
        (Compute::CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_32F),
        (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, CUDA_R_32F, CUDA_R_32F),
        (Compute::CUBLAS_COMPUTE_32F, CUDA_R_16BF, CUDA_R_16BF),
        (Compute::CUBLAS_COMPUTE_32F, CUDA_R_16BF, CUDA_R_32F),
        (Compute::CUBLAS_COMPUTE_32F, CUDA_R_16F, CUDA_R_16F),
        (Compute::CUBLAS_COMPUTE_32F, CUDA_R_16F, CUDA_R_32F),
    ];
    for (compute, inputs, outputs) in types {
        for transposed in [[false, false], [true, false], [false, true], [true, true]] {
            check(compute, inputs, outputs, transposed, 1);
        }
        check(compute, inputs, outputs, [true, false], 3);
    }
}

#[test]
fn tf32_rounds_the_inputs_and_f32_does_not() {
    let stream = stream();
    let one = |kind| Matrix::new(kind, 1, 1);
    // 1 + 2^-12 is no TF32 number.
    let x = 1.0 + 2f32.powi(-12);
    let (a, b, d) = (
        stream.clone_htod(&[x]).unwrap(),
        stream.clone_htod(&[1_f32]).unwrap(),
        stream.alloc_zeros::<f32>(1),
    );
    let d = d.unwrap();
    let at = [&a, &b, &d, &d].map(|slice| slice.device_ptr(&stream).0);
    for (compute, wanted) in [(Compute::CUBLAS_COMPUTE_32F_FAST_TF32, 1.0), (Compute::CUBLAS_COMPUTE_32F, x)]
    {
        let product = Product::new(compute, Kind::CUDA_R_32F, [one(Kind::CUDA_R_32F); 4]);
        product.run(&stream, [1_f32, 0.0], at).unwrap();
        assert_eq!(stream.clone_dtoh(&d).unwrap(), [wanted]);
    }
}

#[test]
fn matrices_in_rows_are_the_transposes_of_those_in_columns() {
    let stream = stream();
    let (m, n, k) = (5, 7, 3);
    let rows = |rows, columns| Matrix {
        leading: columns,
        by_rows: true,
        ..Matrix::new(Kind::CUDA_R_32F, rows, columns)
    };
    let list = |count, seed| values(count, seed).iter().map(|x| *x as f32).collect::<Vec<_>>();
    let (va, vb) = (list(m * k, 1), list(k * n, 2));
    let (a, b) = (stream.clone_htod(&va).unwrap(), stream.clone_htod(&vb).unwrap());
    let d = stream.alloc_zeros::<f32>(m * n).unwrap();
    let at = [&a, &b, &d, &d].map(|slice| slice.device_ptr(&stream).0);
    let matrices = [rows(m, k), rows(k, n), rows(m, n), rows(m, n)];
    Product::new(Compute::CUBLAS_COMPUTE_32F, Kind::CUDA_R_32F, matrices)
        .run(&stream, [1_f32, 0.0], at)
        .unwrap();
    let got = stream.clone_dtoh(&d).unwrap();
    for i in 0..m {
        for j in 0..n {
            assert_eq!(got[i * n + j], (0..k).map(|p| va[i * k + p] * vb[p * n + j]).sum::<f32>());
        }
    }
}

#[test]
fn cudarcs_safe_interface_runs_it() {
    let stream = stream();
    let library = CudaBlasLT::new(stream.clone()).unwrap();
    let (a, b) = (
        stream.clone_htod(&[1_f32, 2.0, 3.0, 4.0]).unwrap(),
        stream.clone_htod(&[5_f32, 6.0, 7.0, 8.0]).unwrap(),
    );
    let mut c = stream.alloc_zeros::<f32>(4).unwrap();
    let config = MatmulConfig {
        transa: false,
        transb: false,
        transc: false,
        m: 2,
        n: 2,
        k: 2,
        alpha: 1.0,
        lda: 2,
        ldb: 2,
        beta: 0.0,
        ldc: 2,
        stride_a: None,
        stride_b: None,
        stride_c: None,
        stride_bias: None,
        batch_size: None,
    };
    // SAFETY: the shapes fit.
    unsafe { library.matmul(config, &a, &b, &mut c, None, None) }.unwrap();
    assert_eq!(stream.clone_dtoh(&c).unwrap(), [23.0, 34.0, 31.0, 46.0]);
}

#[test]
fn a_product_is_captured_into_a_graph() {
    let stream = stream();
    let one = Matrix::new(Kind::CUDA_R_32F, 2, 2);
    let mut a = stream.clone_htod(&[1_f32, 0.0, 0.0, 1.0]).unwrap();
    let b = stream.clone_htod(&[1_f32, 2.0, 3.0, 4.0]).unwrap();
    let d = stream.alloc_zeros::<f32>(4).unwrap();
    let at = [&a, &b, &d, &d].map(|slice| slice.device_ptr(&stream).0);
    let product = Product::new(Compute::CUBLAS_COMPUTE_32F, Kind::CUDA_R_32F, [one; 4]);
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    product.run(&stream, [1_f32, 0.0], at).unwrap();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    assert_eq!(stream.clone_dtoh(&d).unwrap(), [0.0; 4]);
    for factor in [1_f32, 3.0] {
        stream.memcpy_htod(&[factor, 0.0, 0.0, factor], &mut a).unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&d).unwrap(), [1.0, 2.0, 3.0, 4.0].map(|x: f32| x * factor));
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_runs() {
    let stream = stream();
    let matrix = |rows, columns| Matrix::new(Kind::CUDA_R_32F, rows, columns);
    let run = |matrices| {
        let product = Product::new(Compute::CUBLAS_COMPUTE_32F, Kind::CUDA_R_32F, matrices);
        product.run(&stream, [1_f32, 0.0], [4096; 4]).map_err(|error| error.0)
    };
    let fits = [matrix(2, 3), matrix(3, 4), matrix(2, 4), matrix(2, 4)];
    let inner = [matrix(2, 5), fits[1], fits[2], fits[3]];
    assert_eq!(run(inner), Err(Status::CUBLAS_STATUS_INVALID_VALUE));
    let leading = [Matrix { leading: 1, ..fits[0] }, fits[1], fits[2], fits[3]];
    assert_eq!(run(leading), Err(Status::CUBLAS_STATUS_INVALID_VALUE));
    let batches = [Matrix { batches: 2, ..fits[0] }, fits[1], fits[2], fits[3]];
    assert_eq!(run(batches), Err(Status::CUBLAS_STATUS_INVALID_VALUE));
    let mixed = [Matrix { kind: Kind::CUDA_R_16BF, ..fits[0] }, fits[1], fits[2], fits[3]];
    assert_eq!(run(mixed), Err(Status::CUBLAS_STATUS_NOT_SUPPORTED));
}

#[test]
fn a_matrix_that_is_shorter_than_it_is_said_to_be_is_an_illegal_access() {
    let stream = stream();
    let square = Matrix::new(Kind::CUDA_R_32F, 8, 8);
    let (a, short) = (stream.alloc_zeros::<f32>(64).unwrap(), stream.alloc_zeros::<f32>(63).unwrap());
    let at = [&a, &short, &a, &a].map(|slice| slice.device_ptr(&stream).0);
    Product::new(Compute::CUBLAS_COMPUTE_32F, Kind::CUDA_R_32F, [square; 4])
        .run(&stream, [1_f32, 0.0], at)
        .unwrap();
    assert_eq!(stream.synchronize().map_err(|e| e.0), Err(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
}

#[test]
fn an_input_of_another_stream_that_was_not_waited_for_is_reported() {
    let stream = stream();
    let other = stream.context().new_stream().unwrap();
    let square = Matrix::new(Kind::CUDA_R_32F, 8, 8);
    let (a, d) = (other.alloc_zeros::<f32>(64).unwrap(), stream.alloc_zeros::<f32>(64).unwrap());
    let at = [&a, &a, &d, &d].map(|slice| slice.device_ptr(&stream).0);
    let run = Product::new(Compute::CUBLAS_COMPUTE_32F, Kind::CUDA_R_32F, [square; 4]).run(
        &stream,
        [1_f32, 0.0],
        at,
    );
    run.unwrap();
    assert_eq!(stream.synchronize().map_err(|e| e.0), Err(sys::CUresult::CUDA_ERROR_LAUNCH_FAILED));
}

#[test]
fn a_product_of_a_transformers_size_takes_less_than_a_tenth_of_a_second() {
    let stream = stream();
    let (m, n, k) = (768, 768, 3072);
    let matrix = |rows, columns| Matrix::new(Kind::CUDA_R_32F, rows, columns);
    let (a, b) = (stream.alloc_zeros::<f32>(m * k).unwrap(), stream.alloc_zeros::<f32>(k * n).unwrap());
    let d = stream.alloc_zeros::<f32>(m * n).unwrap();
    let at = [&a, &b, &d, &d].map(|slice| slice.device_ptr(&stream).0);
    let product = Product::new(
        Compute::CUBLAS_COMPUTE_32F,
        Kind::CUDA_R_32F,
        [matrix(m, k), matrix(k, n), matrix(m, n), matrix(m, n)],
    )
    .with(Attribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, 0_i32);
    let time = || {
        let start = Instant::now();
        product.run(&stream, [1_f32, 0.0], at).unwrap();
        stream.synchronize().unwrap();
        start.elapsed()
    };
    let best = (0..5).map(|_| time()).min().unwrap();
    eprintln!("{m} x {n} x {k}: {best:?}, {:.1} GFLOP/s", 2e-9 * (m * n * k) as f64 / best.as_secs_f64());
    // Far more than it takes, for machines that are busy or have no vector instructions.
    assert!(best.as_secs_f64() < 2.0, "{best:?}");
}

#[test]
fn a_long_sum_wants_a_workspace_and_spoils_what_is_there() {
    let (stream, kind) = (stream(), Kind::CUDA_R_32F);
    let (m, n, k) = (5, 3, 40);
    let (a, b) = (values(m * k, 1), values(k * n, 2));
    let send = |values: &[f64]| stream.clone_htod(&bytes(kind, values)).unwrap();
    let (a_there, b_there, d) = (send(&a), send(&b), stream.alloc_zeros::<u8>(4 * m * n).unwrap());
    let room = stream.alloc_zeros::<u8>(1024).unwrap();
    let matrices = [(m, k), (k, n), (m, n), (m, n)].map(|(rows, columns)| Matrix::new(kind, rows, columns));
    let product = Product::new(Compute::CUBLAS_COMPUTE_32F, kind, matrices);
    let at = [&a_there, &b_there, &d, &d].map(|slice| address(slice, &stream));
    let run = |workspace| product.run_in(&stream, [1.0f32, 0.0], at, workspace);
    let start = address(&room, &stream);
    assert_eq!(run((start, 1024)).unwrap(), 256);
    let wanted: Vec<f64> =
        (0..m * n).map(|e| (0..k).map(|p| a[p * m + e % m] * b[e / m * k + p]).sum()).collect();
    assert_eq!(numbers(kind, &stream.clone_dtoh(&d).unwrap()), wanted);
    let left = stream.clone_dtoh(&room).unwrap();
    assert_eq!((&left[..256], &left[256..]), (&[0xff; 256][..], &[0; 768][..]));
    for wrong in [(start, 255), (start + 16, 512)] {
        assert_eq!(run(wrong).unwrap_err().0, Status::CUBLAS_STATUS_INVALID_VALUE);
    }
    assert_eq!(run((0, 0)).unwrap(), 0);
}
