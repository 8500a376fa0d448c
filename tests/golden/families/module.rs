//! Modules: built from their settings, filled with the case's state, run, and differentiated.

use phalanx::autograd::{Options, backward};
use phalanx::nn::{
    EmbeddingConfig, Entry, Hidden, LayerNormConfig, LinearConfig, Module, MultiheadAttentionConfig,
    Parameters, RecurrentConfig, RmsNormConfig, Scope, TransformerEncoderLayerConfig, load_state_dict,
    models::Activation,
};
use phalanx::{Context, DType, Device, Tensor, Var, nn};

use crate::case::{Attrs, Case, Set};
use crate::compare::compare;
use crate::run::short;

type Outputs = nn::Result<Vec<Var>>;
type Forward = Box<dyn Fn(&Arguments) -> Outputs>;
type Built = nn::Result<(Box<dyn Parameters>, Forward)>;

/// The module family.
pub fn run(set: &Set, case: &Case) -> Option<Result<(), String>> {
    let name = case.op.strip_prefix("module:")?;
    Some(check(set, case, name))
}

/// What a module is called with.
struct Arguments(Vec<(String, Var)>);

impl Arguments {
    fn opt(&self, name: &str) -> Option<&Var> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, var)| var)
    }

    fn var(&self, name: &str) -> nn::Result<&Var> {
        self.opt(name).ok_or_else(|| nn::Error::Invalid { what: name.into(), why: "not given".into() })
    }
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn check(set: &Set, case: &Case, name: &str) -> Result<(), String> {
    let attrs = Attrs::new(&case.attrs);
    let empty = serde_json::Map::new();
    let object = |name: &str| attrs.get(name).and_then(|v| v.as_object()).unwrap_or(&empty);
    let (init, forward) = (Attrs::new(object("init")), Attrs::new(object("forward")));
    let (mut state, mut arguments) = (Vec::new(), Vec::new());
    for input in &case.inputs {
        let tensor = set.tensor(case, &input.key)?;
        match input.name.strip_prefix("state.") {
            Some(name) => state.push((name.to_string(), tensor)),
            None if input.requires_grad => arguments.push((input, Var::leaf(tensor).map_err(said)?)),
            None => arguments.push((input, Var::new(tensor))),
        }
    }
    let floats = state.iter().map(|(_, t)| t.dtype()).chain(arguments.iter().map(|(_, v)| v.dtype()));
    let dtype = floats.into_iter().find(|dtype| dtype.is_float()).unwrap_or(DType::F32);
    let scope = Scope::new(0, dtype, Device::CPU);
    let (module, call) =
        build(name, &init, &forward, &scope).ok_or(format!("module {name} is unknown"))?.map_err(said)?;
    if let Some(unknown) = init.unread().or(forward.unread()) {
        return Err(format!("attribute {unknown} of {name} is unknown"));
    }
    load_state_dict(&*module, state).map_err(said)?;

    let training = attrs.bool_or("training", false);
    let _mode = Context::with(|c| c.train = training);
    let seen = |(input, var): &(&crate::case::Input, Var)| {
        let var = input.permute.as_ref().map_or(Ok(var.clone()), |dims| var.permute(dims)).map_err(said)?;
        Ok((input.name.clone(), var))
    };
    let seen: Vec<_> = arguments.iter().map(seen).collect::<Result<_, String>>()?;
    let outputs = call(&Arguments(seen)).map_err(said)?;
    if outputs.len() < case.outputs.len() {
        return Err(format!("gave {} outputs, wanted {}", outputs.len(), case.outputs.len()));
    }
    for (key, output) in case.outputs.iter().zip(&outputs) {
        compare(short(key), output.tensor(), &set.tensor(case, key)?, case.rtol, case.atol)?;
    }
    let roots = case.cotangents.iter().zip(&outputs);
    let roots = roots.map(|(key, output)| Ok((output.clone(), Some(Var::new(set.tensor(case, key)?)))));
    let roots: Vec<_> = roots.collect::<Result<_, String>>()?;
    if roots.is_empty() {
        return Ok(());
    }
    backward(&roots, Options::default()).map_err(said)?;
    for (input, key) in case.inputs.iter().zip(&case.grads) {
        let Some(key) = key else { continue };
        let (value, grad) = match input.name.strip_prefix("state.") {
            Some(name) => of_state(&*module, name)?,
            None => {
                let var = &arguments.iter().find(|(i, _)| i.name == input.name).ok_or("lost an argument")?.1;
                (var.tensor().clone(), var.grad().map(Var::into_tensor))
            }
        };
        let grad = grad.map_or_else(|| value.zeros_like(), Ok).map_err(said)?;
        compare(short(key), &grad, &set.tensor(case, key)?, case.rtol, case.atol)?;
    }
    Ok(())
}

/// A parameter's value and gradient.
fn of_state(module: &dyn Parameters, name: &str) -> Result<(Tensor, Option<Tensor>), String> {
    let mut found = Err(format!("no parameter {name}"));
    module.visit("", &mut |path, entry| {
        if let (true, Entry::Parameter(p)) = (path == name, entry) {
            found = p.grad().map(|grad| (p.tensor(), grad)).map_err(said);
        }
    });
    found
}

/// A module of one input and one output.
fn plain<M: Module + 'static>(module: nn::Result<M>) -> Built {
    let module = std::sync::Arc::new(module?);
    let call = module.clone();
    Ok((Box::new(module), Box::new(move |x| Ok(vec![call.forward(x.var("input")?)?]))))
}

fn build(name: &str, init: &Attrs<'_>, forward: &Attrs<'_>, scope: &Scope) -> Option<Built> {
    let size = |name: &str| init.int_or(name, 0) as usize;
    let sizes = |name: &str| init.sizes(name).unwrap_or_default();
    let eps = |default: f64| init.float_or("eps", default);
    Some(match name {
        "Linear" => plain(
            LinearConfig::new(size("in_features"), size("out_features"))
                .with_bias(init.bool_or("bias", true))
                .init(scope),
        ),
        "LayerNorm" => plain(
            LayerNormConfig::new(&sizes("normalized_shape"))
                .with_eps(eps(1e-5))
                .with_affine(init.bool_or("elementwise_affine", true))
                .with_bias(init.bool_or("bias", true))
                .init(scope),
        ),
        "RMSNorm" => {
            let smallest = if scope.dtype() == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
            plain(
                RmsNormConfig::new(&sizes("normalized_shape"))
                    .with_eps(eps(smallest))
                    .with_affine(init.bool_or("elementwise_affine", true))
                    .init(scope),
            )
        }
        "Embedding" => {
            let config = EmbeddingConfig::new(size("num_embeddings"), size("embedding_dim"));
            let padding = init.int("padding_idx").map(|row| row as isize);
            plain(padding.map_or(config, |row| config.with_padding(row)).init(scope))
        }
        "MultiheadAttention" => attention(init, forward, scope),
        "TransformerEncoderLayer" => encoder(init, scope),
        "LSTM" => recurrent(init).init_lstm(scope).map(|module| {
            let module = std::sync::Arc::new(module);
            let call = module.clone();
            let call = move |x: &Arguments| -> Outputs {
                let done = call.forward(x.var("input")?, x.opt("h_0"), x.opt("c_0"))?;
                Ok(vec![done.output, done.hidden, done.cell])
            };
            (Box::new(module) as Box<dyn Parameters>, Box::new(call) as Forward)
        }),
        "GRU" => recurrent(init).init_gru(scope).map(|module| {
            let module = std::sync::Arc::new(module);
            let call = module.clone();
            let call = move |x: &Arguments| -> Outputs {
                let (output, hidden) = call.forward(x.var("input")?, x.opt("h_0"))?;
                Ok(vec![output, hidden])
            };
            (Box::new(module) as Box<dyn Parameters>, Box::new(call) as Forward)
        }),
        _ => return None,
    })
}

fn recurrent(init: &Attrs<'_>) -> RecurrentConfig {
    init.bool_or("batch_first", true);
    RecurrentConfig::new(init.int_or("input_size", 0) as usize, init.int_or("hidden_size", 0) as usize)
        .with_layers(init.int_or("num_layers", 1) as usize)
        .with_bias(init.bool_or("bias", true))
}

fn attention(init: &Attrs<'_>, forward: &Attrs<'_>, scope: &Scope) -> Built {
    init.bool_or("batch_first", true);
    let config = MultiheadAttentionConfig::new(
        init.int_or("embed_dim", 0) as usize,
        init.int_or("num_heads", 1) as usize,
    );
    let config = config.with_bias(init.bool_or("bias", true)).with_dropout(init.float_or("dropout", 0.0));
    let module = std::sync::Arc::new(config.init(scope)?);
    let (weights, average) =
        (forward.bool_or("need_weights", true), forward.bool_or("average_attn_weights", true));
    let call = module.clone();
    let call = move |x: &Arguments| -> Outputs {
        let query = x.var("query")?;
        let (key, value) = (x.opt("key").unwrap_or(query), x.opt("value").or(x.opt("key")).unwrap_or(query));
        let hidden = Hidden { mask: x.opt("attn_mask"), keys: x.opt("key_padding_mask") };
        if !weights {
            return Ok(vec![call.forward(query, key, value, hidden)?]);
        }
        let (y, p) = call.forward_with_weights(query, key, value, hidden)?;
        Ok(vec![y, if average { p.mean(&[1], false)? } else { p }])
    };
    Ok((Box::new(module), Box::new(call)))
}

fn encoder(init: &Attrs<'_>, scope: &Scope) -> Built {
    init.bool_or("batch_first", true);
    let config = TransformerEncoderLayerConfig::new(
        init.int_or("d_model", 0) as usize,
        init.int_or("nhead", 1) as usize,
    );
    let config = TransformerEncoderLayerConfig {
        inner: init.int_or("dim_feedforward", 2048) as usize,
        dropout: init.float_or("dropout", 0.1),
        activation: if init.str_or("activation", "relu") == "gelu" {
            Activation::Gelu
        } else {
            Activation::Relu
        },
        eps: init.float_or("layer_norm_eps", 1e-5),
        norm_first: init.bool_or("norm_first", false),
        bias: init.bool_or("bias", true),
        ..config
    };
    let module = std::sync::Arc::new(config.init(scope)?);
    let call = module.clone();
    let call = move |x: &Arguments| -> Outputs {
        let hidden = Hidden { mask: x.opt("src_mask"), keys: x.opt("src_key_padding_mask") };
        Ok(vec![call.forward_masked(x.var("src")?, hidden)?])
    };
    Ok((Box::new(module), Box::new(call)))
}
