//! What all composed operations promise: any strides, the shapes of `meta`, halves computed in f32.

use phalanx_kernels::{self as kernels, Conv1dOptions, Conv3dOptions, Reduction};
use phalanx_tensor::{DType, Device, Tensor};

use super::{
    EmbeddingBagOptions, FoldOptions, GaussianNll, Interpolate, InterpolateMode, MeshIndexing, PadMode,
    PoissonNll, Pool1dOptions, Pool3dOptions, TripletMargin,
};
use crate::{GradCheck, Options, Result, Var, grad, gradcheck};

type Function = fn(&[Var]) -> Result<Vec<Var>>;

/// A name, the inputs' shapes and a function of inputs between -1 and 1.
type Case = (&'static str, &'static [&'static [usize]], Function);

fn one(y: Result<Var>) -> Result<Vec<Var>> {
    Ok(vec![y?])
}

/// i64 indices on the inputs' device.
fn ints(like: &Var, values: &[i64], shape: &[usize]) -> Result<Var> {
    Var::from_slice(values, shape, like.device())
}

fn strided() -> Conv3dOptions {
    Conv3dOptions { stride: [2, 1, 2], padding: [1, 0, 1], dilation: [1, 2, 1], groups: 2 }
}

const CASES: &[Case] = &[
    ("index", &[&[3, 4, 2]], |v| one(v[0].index(&[None, Some(&ints(&v[0], &[1, -4, 1], &[3])?)]))),
    ("index of two", &[&[3, 4, 2]], |v| {
        let (rows, columns) = (ints(&v[0], &[0, 2], &[2, 1])?, ints(&v[0], &[-1, 0, 0], &[3])?);
        one(v[0].index(&[Some(&rows), None, Some(&columns)]).and_then(|y| y.tanh()))
    }),
    ("index_put", &[&[3, 4, 2], &[3, 2]], |v| {
        one(v[0].index_put(&[None, Some(&ints(&v[0], &[1, -4, 1], &[3])?)], &v[1], false))
    }),
    ("index_put accumulate", &[&[3, 4, 2], &[3, 3, 2]], |v| {
        one(v[0].index_put(&[None, Some(&ints(&v[0], &[1, -4, 1], &[3])?)], &v[1], true))
    }),
    ("index_put of nothing", &[&[3, 4], &[1, 0]], |v| {
        one(v[0].index_put(&[None, Some(&ints(&v[0], &[], &[0])?)], &v[1], false))
    }),
    (
        "take_along_dim",
        &[&[3, 4]],
        |v| one(v[0].take_along_dim(&ints(&v[0], &[3, 0, 0], &[1, 3])?, Some(-1))),
    ),
    ("repeat_interleave", &[&[3, 4]], |v| one(v[0].repeat_interleave(3, Some(0)))),
    ("tile", &[&[3, 4]], |v| one(v[0].tile(&[2, 1, 2]))),
    ("diag", &[&[4, 3]], |v| one(v[0].diag(-1))),
    ("diag_embed", &[&[3, 2]], |v| one(v[0].diag_embed(-1, 0, 2))),
    ("rot90", &[&[3, 4, 2]], |v| one(v[0].rot90(-1, &[0, 2]))),
    ("movedim", &[&[3, 4, 2]], |v| one(v[0].movedim(&[0, 1], &[-1, 0]))),
    ("unbind", &[&[3, 4, 2]], |v| v[0].unbind(1)),
    ("unbind of nothing", &[&[3, 0, 2]], |v| v[0].unbind(1)),
    ("meshgrid", &[&[3], &[1], &[2]], |v| Var::meshgrid(v, MeshIndexing::Xy)),
    ("pixel_shuffle", &[&[2, 4, 3, 1]], |v| one(v[0].pixel_shuffle(2))),
    ("pixel_unshuffle", &[&[2, 1, 4, 2]], |v| one(v[0].pixel_unshuffle(2))),
    ("unfold", &[&[2, 3, 5, 4]], |v| {
        let options =
            FoldOptions { stride: [2, 1], padding: [1, 0], dilation: [1, 2], ..FoldOptions::new([3, 2]) };
        one(v[0].unfold(&options))
    }),
    ("fold", &[&[2, 6, 16]], |v| one(v[0].fold([4, 5], &FoldOptions::new([1, 2])).and_then(|y| y.tanh()))),
    ("pad reflect", &[&[2, 3, 4]], |v| one(v[0].pad_mode(&[(3, 1), (-1, 2)], PadMode::Reflect))),
    ("pad replicate", &[&[2, 3, 4]], |v| one(v[0].pad_mode(&[(3, 1), (-1, 2)], PadMode::Replicate))),
    ("pad circular", &[&[2, 3, 4]], |v| one(v[0].pad_mode(&[(3, 1), (-1, 2)], PadMode::Circular))),
    ("interpolate nearest", &[&[2, 1, 3]], |v| {
        one(v[0].interpolate(&Interpolate::to_size(&[7], InterpolateMode::Nearest)))
    }),
    ("interpolate bilinear", &[&[2, 2, 3, 5]], |v| {
        one(v[0].interpolate(&Interpolate::by_scale(&[1.7, 0.6], InterpolateMode::Bilinear)))
    }),
    ("interpolate bicubic", &[&[2, 2, 3, 5]], |v| {
        let options = Interpolate::to_size(&[4, 3], InterpolateMode::Bicubic);
        one(v[0].interpolate(&options.with_align_corners(true)))
    }),
    ("conv3d", &[&[2, 4, 3, 4, 3], &[2, 2, 2, 2, 2], &[2]], |v| {
        one(v[0].conv3d(&v[1], Some(&v[2]), &strided()))
    }),
    ("conv_transpose3d", &[&[1, 2, 2, 1, 2], &[2, 2, 2, 2, 2]], |v| {
        one(v[0].conv_transpose3d(&v[1], None, &strided(), [1, 0, 1]))
    }),
    ("conv_transpose1d", &[&[2, 2, 3], &[2, 3, 2], &[3]], |v| {
        let options = Conv1dOptions { stride: 2, padding: 1, ..Conv1dOptions::default() };
        one(v[0].conv_transpose1d(&v[1], Some(&v[2]), &options, 1))
    }),
    ("max_pool1d", &[&[2, 3, 7]], |v| {
        one(v[0].max_pool1d(&Pool1dOptions { padding: 1, ..Pool1dOptions::new(3) }))
    }),
    ("avg_pool1d", &[&[3, 7]], |v| {
        one(v[0].avg_pool1d(&Pool1dOptions { stride: 2, ..Pool1dOptions::new(3) }, true))
    }),
    ("adaptive_avg_pool1d", &[&[2, 3, 7]], |v| one(v[0].adaptive_avg_pool1d(4))),
    ("max_pool3d", &[&[1, 2, 4, 3, 5]], |v| one(v[0].max_pool3d(&Pool3dOptions::new([2, 2, 3])))),
    ("avg_pool3d", &[&[1, 2, 4, 3, 5]], |v| {
        let options = Pool3dOptions { padding: [1, 0, 1], ..Pool3dOptions::new([2, 2, 3]) };
        one(v[0].avg_pool3d(&options, false))
    }),
    ("adaptive_max_pool2d", &[&[2, 5, 4]], |v| one(v[0].adaptive_max_pool2d([3, 3]))),
    ("local_response_norm", &[&[2, 5, 3]], |v| one(v[0].local_response_norm(4, 0.5, 0.75, 1.5))),
    ("instance_norm", &[&[2, 3, 5], &[3], &[3]], |v| one(v[0].instance_norm(Some(&v[1]), Some(&v[2]), 1e-1))),
    ("embedding_bag", &[&[4, 3]], |v| {
        one(v[0].embedding_bag(&ints(&v[0], &[0, 3, 3, 1], &[2, 2])?, &EmbeddingBagOptions::default()))
    }),
    ("embedding_bag offsets", &[&[4, 3]], |v| {
        let offsets = Some(ints(&v[0], &[0, 3, 3], &[3])?);
        let options = EmbeddingBagOptions { offsets, padding: Some(1), ..EmbeddingBagOptions::default() };
        one(v[0].embedding_bag(&ints(&v[0], &[0, 3, 3, 1], &[4])?, &options))
    }),
    ("huber_loss", &[&[3, 4], &[4]], |v| one(v[0].huber_loss(&v[1], 0.37, Reduction::None))),
    ("binary_cross_entropy", &[&[3, 4], &[3, 4]], |v| {
        one(v[0].sigmoid()?.binary_cross_entropy(&v[1].sigmoid()?, None, Reduction::Mean))
    }),
    ("poisson_nll_loss", &[&[3, 4], &[3, 4]], |v| {
        one(v[0]
            .poisson_nll_loss(&v[1].add_scalar(3.0)?, &PoissonNll { full: true, ..PoissonNll::default() }))
    }),
    ("gaussian_nll_loss", &[&[3, 4], &[3, 4], &[3]], |v| {
        one(v[0].gaussian_nll_loss(&v[1], &v[2].add_scalar(2.0)?, &GaussianNll::default()))
    }),
    ("cosine_embedding_loss", &[&[2, 4], &[2, 4]], |v| {
        one(v[0].cosine_embedding_loss(&v[1], &ints(&v[0], &[1, -1], &[2])?, -0.9, Reduction::None))
    }),
    ("margin_ranking_loss", &[&[3], &[3]], |v| {
        one(v[0].margin_ranking_loss(&v[1], &ints(&v[0], &[1, -1, 1], &[3])?, 0.23, Reduction::None))
    }),
    ("hinge_embedding_loss", &[&[2, 3]], |v| {
        one(v[0].hinge_embedding_loss(&ints(&v[0], &[1, -1, -1], &[3])?, 0.61, Reduction::Sum))
    }),
    ("triplet_margin_loss", &[&[3, 4], &[3, 4], &[3, 4]], |v| {
        let config = TripletMargin { swap: true, margin: 2.0, ..TripletMargin::default() };
        one(v[0].triplet_margin_loss(&v[1], &v[2], &config))
    }),
];

/// Numbers between -1 and 1, no two the same.
fn inputs(shapes: &[&[usize]]) -> Vec<Tensor> {
    let input = |(i, shape): (usize, &&[usize])| {
        let value = |at: usize| 2.0 * (at as f64 * 0.618_033_988_749_894_9 + i as f64 * 0.37).fract() - 1.0;
        let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
        Tensor::from_slice(&values, shape, Device::CPU).unwrap()
    };
    shapes.iter().enumerate().map(input).collect()
}

/// The outputs and the gradients of their sum of squares, of leaves that hold these.
fn run(f: Function, inputs: &[Tensor]) -> Result<(Vec<Var>, Vec<Var>)> {
    let leaves = inputs.iter().map(|t| Var::leaf(t.clone())).collect::<Result<Vec<_>>>()?;
    let outputs = f(&leaves)?;
    if outputs.is_empty() {
        return Ok((outputs, Vec::new()));
    }
    let roots = outputs.iter().map(|y| Ok((y.square()?.sum_all()?, None))).collect::<Result<Vec<_>>>()?;
    let grads = grad(&roots, &leaves.iter().collect::<Vec<_>>(), Options::default())?;
    let grads = grads.into_iter().zip(&leaves).map(|(dx, x)| dx.map_or_else(|| x.mul_scalar(0.0), Ok));
    Ok((outputs, grads.collect::<Result<_>>()?))
}

fn values(x: &Var) -> Vec<f64> {
    x.to(DType::F64).unwrap().to_vec().unwrap()
}

/// The same elements behind other strides.
fn turned(t: &Tensor) -> Tensor {
    let back: Vec<usize> = (0..t.rank()).rev().collect();
    t.permute(&back).unwrap().contiguous().unwrap().permute(&back).unwrap()
}

#[test]
fn strides_change_nothing() {
    for (name, shapes, f) in CASES {
        let plain = inputs(shapes);
        let strided: Vec<Tensor> = plain.iter().map(turned).collect();
        let (a, b) = (run(*f, &plain).unwrap(), run(*f, &strided).unwrap());
        for (a, b) in a.0.iter().chain(&a.1).zip(b.0.iter().chain(&b.1)) {
            assert_eq!((a.shape(), values(a)), (b.shape(), values(b)), "{name}");
        }
        if a.0.is_empty() {
            continue;
        }
        gradcheck(f, &strided, GradCheck::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn meta_has_the_shapes_and_dtypes_of_the_cpu() {
    for (name, shapes, f) in CASES {
        for dtype in [DType::F32, DType::BF16] {
            let here: Vec<Tensor> = inputs(shapes).iter().map(|t| kernels::cast(t, dtype).unwrap()).collect();
            let there: Vec<Tensor> =
                here.iter().map(|t| Tensor::empty(t.shape(), dtype, Device::Meta(0)).unwrap()).collect();
            let (a, b) = (run(*f, &here).unwrap(), run(*f, &there).unwrap_or_else(|e| panic!("{name}: {e}")));
            assert_eq!(a.0.len(), b.0.len(), "{name}");
            for (a, b) in a.0.iter().chain(&a.1).zip(b.0.iter().chain(&b.1)) {
                assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()), "{name}");
            }
        }
    }
}

#[test]
fn halves_are_within_a_few_roundings_of_the_exact_result() {
    for (name, shapes, f) in CASES {
        for (dtype, ulp) in [(DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            let halves: Vec<Tensor> =
                inputs(shapes).iter().map(|t| kernels::cast(t, dtype).unwrap()).collect();
            let exact: Vec<Tensor> = halves.iter().map(|t| kernels::cast(t, DType::F64).unwrap()).collect();
            let (a, b) = (run(*f, &halves).unwrap(), run(*f, &exact).unwrap());
            assert!(a.0.iter().all(|y| y.dtype() == dtype), "{name}");
            for (got, want) in a.0.iter().zip(&b.0) {
                for (got, want) in values(got).into_iter().zip(values(want)) {
                    assert!(
                        (got - want).abs() <= 4.0 * ulp * want.abs().max(0.1),
                        "{name}: {got} for {want}"
                    );
                }
            }
        }
    }
}
