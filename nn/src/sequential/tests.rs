//! What [`Sequential`] and its configuration promise: numbers, slices, units, hooks.

use phalanx_tensor::{DType, Device};

use super::*;
use crate::{
    BatchNormConfig, Conv2dConfig, DropoutConfig, EmbeddingConfig, Flatten, GroupNormConfig, Linear,
    LinearConfig, MaxPool2d, Relu, Scope, load_state_dict, state_dict,
};

fn scope() -> Scope {
    Scope::new(3, DType::F64, Device::CPU)
}

fn layers() -> SequentialConfig {
    let inner =
        SequentialConfig::new().with(LinearConfig::new(5, 6)).with(Relu).with(LinearConfig::new(6, 2));
    SequentialConfig::new().with(LinearConfig::new(3, 5)).with(Relu).with(inner).with(LinearConfig::new(2, 4))
}

fn names(model: &Sequential) -> Vec<String> {
    state_dict(model).into_iter().map(|(name, _)| name).collect()
}

fn x() -> Var {
    Var::from_slice(&[0.1, -0.2, 0.3, 0.4, 0.5, -0.6], &[2, 3], Device::CPU).unwrap()
}

fn run(model: &Sequential, x: &Var) -> Vec<f64> {
    model.forward(x).unwrap().to_vec().unwrap()
}

/// The numbers of the units' first parameters, by name in the model.
fn units(model: &Sequential) -> Vec<String> {
    let mut found = Vec::new();
    model.visit_units(&mut |unit| found.push(unit.parameters()[0].name().to_string()));
    found
}

#[test]
fn layers_are_numbered_as_pytorch_numbers_them_and_parameters_are_called_so() {
    let model = layers().init(&scope()).unwrap();
    let want =
        ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "2.2.weight", "2.2.bias", "3.weight", "3.bias"];
    assert_eq!(names(&model), want);
    let called: Vec<String> = model.parameters().iter().map(|p| p.name().to_string()).collect();
    assert_eq!(called, want);
    let by_hand = Sequential::new()
        .with(LinearConfig::new(3, 5).init(&scope().child(0)).unwrap())
        .with(Relu)
        .with(
            Sequential::new()
                .with(LinearConfig::new(5, 6).init(&scope().child("2.0")).unwrap())
                .with(Relu)
                .with(LinearConfig::new(6, 2).init(&scope().child("2.2")).unwrap()),
        )
        .with(LinearConfig::new(2, 4).init(&scope().child(3)).unwrap());
    assert_eq!(run(&by_hand, &x()), run(&model, &x()), "the same initial values");
    let below = layers().init(&scope().child("body")).unwrap();
    assert_eq!(below.parameters()[2].name(), "body.2.0.weight");
}

#[test]
fn a_convolution_net_takes_configurations_modules_and_functions() {
    let model = SequentialConfig::new()
        .with(Conv2dConfig::new(1, 4, [3, 3]).with_padding([1, 1]))
        .with(BatchNormConfig::new(4))
        .with(Relu)
        .with(MaxPool2d::new([2, 2]))
        .with(Conv2dConfig::new(4, 4, [3, 3]).with_padding([1, 1]).with_stride([2, 2]))
        .with(GroupNormConfig::new(2, 4))
        .with(DropoutConfig::new(0.5))
        .with_fn(|scope| Conv2dConfig::new(4, 2, [2, 2]).init_transposed(scope))
        .with(Flatten::default())
        .with(LinearConfig::new(2 * 3 * 3, 10))
        .init(&scope())
        .unwrap();
    let x = Var::from_slice(&[0.5; 64], &[1, 1, 8, 8], Device::CPU).unwrap();
    assert_eq!(model.forward(&x).unwrap().shape(), [1, 10]);
    assert_eq!(model.parameters().last().unwrap().name(), "9.bias");
}

#[test]
fn slices_keep_their_numbers_and_together_are_the_whole() {
    let whole = layers().init(&scope()).unwrap();
    let want = run(&whole, &x());
    let (first, second) = layers().init(&scope()).unwrap().split_at(2).unwrap();
    assert_eq!((first.numbers(), second.numbers()), (0..2, 2..4));
    assert_eq!([names(&first), names(&second)].concat(), names(&whole));
    let second = second.slice(2..=3).unwrap();
    assert_eq!(run(&second, &first.forward(&x()).unwrap()), want);
    // A stage that never has the other layers: the same names and values.
    let stage = layers().slice(2..).unwrap().init(&scope()).unwrap();
    assert_eq!((names(&stage), stage.parameters()[0].name()), (names(&second), "2.0.weight"));
    assert_eq!(run(&stage, &first.forward(&x()).unwrap()), want);
    let last = layers().slice(1..).unwrap().slice(3..).unwrap().init(&scope()).unwrap().with(Relu);
    assert_eq!((names(&last), last.numbers()), (vec!["3.weight".to_string(), "3.bias".into()], 3..5));
    let part = state_dict(&whole).into_iter().filter(|(name, _)| name.starts_with('3'));
    load_state_dict(&last, part).unwrap();
    let none = layers().init(&scope()).unwrap().slice(4..).unwrap();
    assert_eq!((none.numbers(), run(&none, &x()).len()), (4..4, 6));
}

#[test]
fn layers_that_are_not_there_are_refused() {
    let said = |error: Error, parts: &[&str]| {
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text:?} lacks one of {parts:?}");
    };
    let model = || layers().init(&scope()).unwrap();
    said(model().slice(2..6).err().unwrap(), &["Sequential::slice", "2..6", "0..4"]);
    said(model().slice(..=usize::MAX).err().unwrap(), &["0..4"]);
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 3..1;
    said(model().slice(backwards).err().unwrap(), &["3..1"]);
    said(model().slice(2..).unwrap().slice(1..3).err().unwrap(), &["1..3", "2..4"]);
    said(model().split_at(5).err().unwrap(), &["split_at", "0..4"]);
    said(layers().slice(5..).err().unwrap(), &["SequentialConfig::slice", "0..4"]);
    let odd = SequentialConfig::new().with(Relu).with(GroupNormConfig::new(2, 3));
    said(odd.init(&scope()).err().unwrap(), &["layer 1: GroupNorm", "2 groups"]);
    let odd = SequentialConfig::new().with(SequentialConfig::new().with(DropoutConfig::new(1.5)));
    said(odd.init(&scope()).err().unwrap(), &["0.0", "1.5"]);
}

#[test]
fn a_policy_makes_units_and_changes_neither_paths_nor_values() {
    let model = || layers().init(&scope()).unwrap();
    let check = |policy: WrapPolicy, want: &[&str]| {
        let wrapped = model().into_units(&policy);
        assert_eq!(units(&wrapped), want);
        assert_eq!((names(&wrapped), run(&wrapped, &x())), (names(&model()), run(&model(), &x())));
        let again = wrapped.into_units(&WrapPolicy::EachLayer);
        let again = units(&again);
        assert!(
            want.iter().all(|unit| again.iter().filter(|u| u == unit).count() == 1),
            "units stay: {again:?}"
        );
    };
    check(WrapPolicy::EachLayer, &["0.weight", "2.0.weight", "2.2.weight", "3.weight"]);
    check(WrapPolicy::BySize(20), &["0.weight", "2.0.weight"]);
    check(WrapPolicy::BySize(40), &["2.0.weight"]);
    check(WrapPolicy::of_type::<Sequential>(), &["2.0.weight"]);
    check(WrapPolicy::of_type::<Linear>(), &["0.weight", "2.0.weight", "2.2.weight", "3.weight"]);
    check(WrapPolicy::by(|module| module.parameters()[0].name() == "3.weight"), &["3.weight"]);
    assert!(units(&model().into_units(&WrapPolicy::BySize(1000))).is_empty());
    let boxed: Box<dyn Module> = Box::new(LinearConfig::new(3, 1).init(&scope()).unwrap());
    let boxed = Sequential::new().with(boxed).into_units(&WrapPolicy::of_type::<Linear>());
    assert_eq!(units(&boxed), ["weight"]);
    let by_hand = Sequential::new().with(WrappedUnit::of(LinearConfig::new(3, 1).init(&scope()).unwrap()));
    assert_eq!(units(&by_hand), ["weight"]);
}

#[test]
fn hooks_go_with_their_layers_into_slices_and_units() {
    let model = layers().init(&scope()).unwrap();
    for path in ["1", "2", "2.1"] {
        model.on_forward(path, |_, y| Ok(Some(y.mul_scalar(0.0)?))).unwrap();
    }
    let zeros = |y: Vec<f64>| y.iter().all(|&y| y == 0.0);
    let (first, rest) = model.split_at(2).unwrap();
    assert!(zeros(run(&first, &x())));
    let rest = rest.into_units(&WrapPolicy::EachLayer).slice(..3).unwrap();
    let y = Var::from_slice(&[1.0; 10], &[2, 5], Device::CPU).unwrap();
    assert!(zeros(run(&rest, &y)));
    rest.on_forward("2.0", |_, _| Err(Error::invalid("hook", "inside a unit's layers"))).unwrap();
    let refused = rest.forward(&y).err().unwrap().to_string();
    assert!(refused.contains("inside a unit's layers"), "{refused}");
}

#[test]
fn tokens_go_through_a_table() {
    let embedding = SequentialConfig::new().with(EmbeddingConfig::new(7, 3)).with(LinearConfig::new(3, 7));
    let model = embedding.init(&scope()).unwrap();
    let tokens = Var::from_slice(&[1i64, 6, 0, 2], &[2, 2], Device::CPU).unwrap();
    assert_eq!(model.forward(&tokens).unwrap().shape(), [2, 2, 7]);
}

#[test]
fn layers_of_inner_sequences_are_replaced_in_order_and_an_error_ends_it() {
    let scope = Scope::new(1, DType::F32, Device::CPU);
    let linear = || LinearConfig::new(2, 2).init(&scope).unwrap();
    let mut model =
        Sequential::new().with(linear()).with(Sequential::new().with(linear()).with(Relu)).with(linear());
    let mut seen = 0;
    let replaced = model.replace_layers::<String>(&mut |layer| {
        seen += 1;
        match (layer.is::<Linear>(), seen) {
            (true, 4) => Err("the third".into()),
            (is_linear, _) => Ok(is_linear.then(|| Box::new(Relu) as Box<dyn Module>)),
        }
    });
    assert_eq!((replaced, seen), (Err("the third".into()), 4));
    assert_eq!(model.parameters().len(), 2, "the last linear map is left");
    assert!(model.get::<Relu>(0).is_some() && model.get::<Relu>("1.0").is_some());
}
