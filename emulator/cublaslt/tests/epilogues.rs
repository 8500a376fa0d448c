//! Every epilogue against its formula, and what the library demands of its operands.

mod common;

use common::{Matrix, Product, stream};
use cudarc::cublaslt::sys::{
    cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue,
    cublasLtMatmulDescAttributes_t as Attribute, cublasStatus_t as Status, cudaDataType_t as Kind,
};
use cudarc::driver::DevicePtr;

const M: usize = 24;
const N: usize = 10;
const K: usize = 7;
/// Rows of aux: a multiple of 8, as the library demands.
const AUX_ROWS: usize = 32;

fn floats(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 29 + seed * 13) % 31) as f32 / 16.0 - 1.0).collect()
}

/// What an epilogue left in D, in the bias and in aux, and what went in.
struct EpilogueResult {
    d: Vec<f32>,
    bias: Vec<f32>,
    aux: Vec<f32>,
}

fn run(epilogue: Epilogue, set_pointers: bool) -> Result<EpilogueResult, Status> {
    let stream = stream();
    let matrix = |rows, columns| Matrix::new(Kind::CUDA_R_32F, rows, columns);
    let send = |values: Vec<f32>| stream.clone_htod(&values).unwrap();
    let (a, b, d) = (send(floats(M * K, 1)), send(floats(K * N, 2)), send(vec![0.0; M * N]));
    let (bias, aux) = (send(floats(M.max(N), 3)), send(floats(AUX_ROWS * N, 4)));
    let mut product = Product::new(
        Compute::CUBLAS_COMPUTE_32F,
        Kind::CUDA_R_32F,
        [matrix(M, K), matrix(K, N), matrix(M, N), matrix(M, N)],
    )
    .with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)
    .with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, AUX_ROWS as i64);
    if set_pointers {
        product = product
            .with(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device_ptr(&stream).0)
            .with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.device_ptr(&stream).0);
    }
    let at = [&a, &b, &d, &d].map(|slice| slice.device_ptr(&stream).0);
    product.run(&stream, [1_f32, 0.0], at).map_err(|error| error.0)?;
    let back = |slice| stream.clone_dtoh(slice).unwrap();
    Ok(EpilogueResult { d: back(&d), bias: back(&bias), aux: back(&aux) })
}

fn a(i: usize, p: usize) -> f64 {
    floats(M * K, 1)[p * M + i].into()
}

fn b(p: usize, j: usize) -> f64 {
    floats(K * N, 2)[j * K + p].into()
}

fn z(i: usize, j: usize) -> f64 {
    (0..K).map(|p| a(i, p) * b(p, j)).sum()
}

fn bias(i: usize) -> f64 {
    floats(M.max(N), 3)[i].into()
}

fn aux(i: usize, j: usize) -> f64 {
    floats(AUX_ROWS * N, 4)[j * AUX_ROWS + i].into()
}

fn gelu(x: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    x / (1.0 + (-2.0 * u).exp())
}

fn gelu_slope(x: f64) -> f64 {
    (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5
}

fn close(got: f32, wanted: f64, place: &str) {
    assert!((f64::from(got) - wanted).abs() < 2e-6 * (1.0 + wanted.abs()), "{place}: {got} {wanted}");
}

fn check_d(run: &EpilogueResult, wanted: impl Fn(usize, usize) -> f64) {
    for j in 0..N {
        for i in 0..M {
            close(run.d[j * M + i], wanted(i, j), &format!("({i}, {j})"));
        }
    }
}

#[test]
fn bias_and_relu_are_applied_to_rows() {
    check_d(&run(Epilogue::CUBLASLT_EPILOGUE_BIAS, true).unwrap(), |i, j| z(i, j) + bias(i));
    check_d(&run(Epilogue::CUBLASLT_EPILOGUE_RELU, true).unwrap(), |i, j| z(i, j).max(0.0));
    check_d(&run(Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS, true).unwrap(), |i, j| (z(i, j) + bias(i)).max(0.0));
}

#[test]
fn gelu_keeps_its_input_in_aux_if_asked() {
    check_d(&run(Epilogue::CUBLASLT_EPILOGUE_GELU, true).unwrap(), |i, j| gelu(z(i, j)));
    check_d(&run(Epilogue::CUBLASLT_EPILOGUE_GELU_BIAS, true).unwrap(), |i, j| gelu(z(i, j) + bias(i)));
    for (epilogue, with_bias) in
        [(Epilogue::CUBLASLT_EPILOGUE_GELU_AUX, 0.0), (Epilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS, 1.0)]
    {
        let run = run(epilogue, true).unwrap();
        let input = |i, j| z(i, j) + with_bias * bias(i);
        check_d(&run, |i, j| gelu(input(i, j)));
        for j in 0..N {
            for i in 0..AUX_ROWS {
                let wanted = if i < M { input(i, j) } else { aux(i, j) };
                close(run.aux[j * AUX_ROWS + i], wanted, "aux");
            }
        }
    }
}

#[test]
fn the_gradient_of_gelu_multiplies_and_sums_its_rows() {
    let wanted = |i, j| z(i, j) * gelu_slope(aux(i, j));
    check_d(&run(Epilogue::CUBLASLT_EPILOGUE_DGELU, true).unwrap(), wanted);
    let run = run(Epilogue::CUBLASLT_EPILOGUE_DGELU_BGRAD, true).unwrap();
    check_d(&run, wanted);
    for i in 0..M {
        close(run.bias[i], (0..N).map(|j| wanted(i, j)).sum(), "bias gradient");
    }
}

#[test]
fn bias_gradients_of_the_inputs_are_sums_over_k() {
    let of_a = run(Epilogue::CUBLASLT_EPILOGUE_BGRADA, true).unwrap();
    check_d(&of_a, z);
    for i in 0..M {
        close(of_a.bias[i], (0..K).map(|p| a(i, p)).sum(), "rows of A");
    }
    let of_b = run(Epilogue::CUBLASLT_EPILOGUE_BGRADB, true).unwrap();
    check_d(&of_b, z);
    for j in 0..N {
        close(of_b.bias[j], (0..K).map(|p| b(p, j)).sum(), "columns of B");
    }
}

#[test]
fn an_epilogue_whose_pointer_is_not_set_is_refused() {
    for epilogue in [Epilogue::CUBLASLT_EPILOGUE_BIAS, Epilogue::CUBLASLT_EPILOGUE_GELU_AUX] {
        assert_eq!(run(epilogue, false).err(), Some(Status::CUBLAS_STATUS_INVALID_VALUE));
    }
}

#[test]
fn an_epilogue_takes_a_bias_and_an_aux_of_the_documented_types_and_places_only() {
    let stream = stream();
    let memory = stream.clone_htod(&vec![0u8; 1 << 16]).unwrap();
    let start = memory.device_ptr(&stream).0;
    let product = |epilogue: Epilogue| {
        let matrix = |rows, columns| {
            let one = Matrix::new(Kind::CUDA_R_16BF, rows, columns);
            Matrix { batches: 2, batch_stride: 128, ..one }
        };
        let layouts = [matrix(16, 8), matrix(8, 8), matrix(16, 8), matrix(16, 8)];
        Product::new(Compute::CUBLAS_COMPUTE_32F, Kind::CUDA_R_32F, layouts)
            .with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)
            .with(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, start + 4096)
            .with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, start + 8192)
            .with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 16i64)
            .with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, 128i64)
    };
    let run = |product: Product| {
        let at = [0, 1024, 2048, 2048].map(|offset| start + offset);
        product.run(&stream, [1_f32, 0.0], at).map_err(|error| error.0)
    };
    let unsupported = Err(Status::CUBLAS_STATUS_NOT_SUPPORTED);
    let invalid = Err(Status::CUBLAS_STATUS_INVALID_VALUE);
    for epilogue in [Epilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS, Epilogue::CUBLASLT_EPILOGUE_DGELU_BGRAD] {
        let with = |attribute, value: i64| run(product(epilogue).with(attribute, value));
        let of_kind = |attribute, kind: Kind| run(product(epilogue).with(attribute, kind as i32));
        assert_eq!(with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 24), Ok(()));
        assert_eq!(with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 20), invalid);
        assert_eq!(with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 8), invalid);
        assert_eq!(with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, 132), invalid);
        let aux = start as i64 + 8192;
        assert_eq!(with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux + 16), Ok(()));
        assert_eq!(with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux + 8), unsupported);
        for attribute in [
            Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
            Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE,
        ] {
            assert_eq!(of_kind(attribute, Kind::CUDA_R_16BF), Ok(()));
            assert_eq!(of_kind(attribute, Kind::CUDA_R_32F), unsupported);
        }
    }
    // Without aux its place says nothing.
    let plain = product(Epilogue::CUBLASLT_EPILOGUE_BGRADB);
    assert_eq!(run(plain.with(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 3i64)), Ok(()));
}
