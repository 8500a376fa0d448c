//! Modules: made from `attrs.init`, loaded from `state.*`, called with `attrs.forward`.

use phalanx::autograd::ContextMode;
use phalanx::autograd::{Error, Result};
use phalanx::kernels::ConvOptions;
use phalanx::nn::{self, Module, Parameters};
use phalanx::{Context, DType, Device, Var};

use super::Call;
use crate::case::Attrs;

/// The module family.
pub fn run(call: &Call<'_>) -> Option<Result<Vec<Var>>> {
    let name = call.op.strip_prefix("module:")?;
    let (init, forward) = (call.attrs.nested("init"), call.attrs.nested("forward"));
    let training = call.attrs.bool_or("training", true);
    let _mode = Context::with(|context| context.set_train(training));
    let case = Case { call, init: &init, forward: &forward, training };
    let outputs = match name {
        "Linear" | "Conv2d" | "LayerNorm" | "RMSNorm" | "GroupNorm" | "Embedding" => case.simple(name),
        "BatchNorm2d" => case.batch_norm(),
        "MultiheadAttention" => case.attention(),
        "TransformerEncoderLayer" => case.encoder_layer(),
        "LSTM" => case.lstm(),
        "GRU" => case.gru(),
        _ => return None,
    };
    for (group, attrs) in [("init", &init), ("forward", &forward)] {
        if let (Ok(_), Some(what)) = (&outputs, attrs.unread()) {
            call.refuse(format!("{group}.{what}"));
        }
    }
    Some(outputs)
}

struct Case<'a> {
    call: &'a Call<'a>,
    init: &'a Attrs<'a>,
    forward: &'a Attrs<'a>,
    training: bool,
}

impl Case<'_> {
    /// Calls a module that was loaded with the case's state, whose parameters stand for the inputs `state.*`.
    fn call<M: Parameters>(
        &self,
        module: nn::Result<M>,
        forward: impl FnOnce(&M) -> nn::Result<Vec<Var>>,
    ) -> Result<Vec<Var>> {
        let module = module?;
        let state = self.state();
        let entries = state.iter().map(|(name, var)| (name.clone(), var.tensor().clone()));
        nn::load_state_dict(&module, entries)?;
        for (name, parameter) in module.named_parameters() {
            self.call.stand_in(format!("state.{name}"), parameter.var());
        }
        Ok(forward(&module)?)
    }

    fn state(&self) -> Vec<(String, Var)> {
        let entry = |name: String| {
            let inner = name.strip_prefix("state.")?.to_string();
            Some((inner, self.call.opt(&name)?.clone()))
        };
        self.call.names().into_iter().filter_map(entry).collect()
    }

    /// Where the module is made: with the state's dtype and device.
    fn scope(&self) -> nn::Scope {
        let state = self.state();
        let first = state.iter().map(|(_, var)| var).find(|var| var.dtype().is_float());
        let (dtype, device) = first.map_or((DType::F32, Device::CPU), |var| (var.dtype(), var.device()));
        nn::Scope::new(0, dtype, device)
    }

    fn size(&self, name: &str) -> Result<usize> {
        let size = self.init.int(name).and_then(|n| usize::try_from(n).ok());
        size.ok_or_else(|| Error::Custom(format!("the case has no init.{name}")))
    }

    fn pair(&self, name: &str, default: usize) -> Result<[usize; 2]> {
        match self.init.sizes(name).as_deref() {
            None if !self.init.has(name) => Ok([default; 2]),
            Some(&[n]) => Ok([n, n]),
            Some(&[h, w]) => Ok([h, w]),
            _ => Err(Error::Custom(format!("init.{name} is no pair of sizes"))),
        }
    }

    fn eps(&self, name: &str) -> f64 {
        self.init.float_or(name, 1e-5)
    }

    fn bias(&self) -> bool {
        self.init.bool_or("bias", true)
    }

    /// Refuses the case unless a switch has the one supported value.
    fn only(&self, name: &str, wanted: bool, default: bool) {
        if self.init.bool_or(name, default) != wanted {
            self.call.refuse(format!("init.{name} = {}", !wanted));
        }
    }

    fn one(&self, module: nn::Result<impl Module>) -> Result<Vec<Var>> {
        let input = self.call.var("input")?;
        self.call(module, |module| Ok(vec![module.forward(input)?]))
    }

    fn simple(&self, name: &str) -> Result<Vec<Var>> {
        let scope = &self.scope();
        let shape = || self.init.sizes("normalized_shape").unwrap_or_default();
        let affine = || self.init.bool_or("elementwise_affine", true);
        match name {
            "Linear" => {
                let config = nn::LinearConfig::new(self.size("in_features")?, self.size("out_features")?);
                self.one(config.with_bias(self.bias()).init(scope))
            }
            "LayerNorm" => {
                let config = nn::LayerNormConfig::new(&shape()).with_eps(self.eps("eps"));
                self.one(config.with_affine(affine()).with_bias(self.bias()).init(scope))
            }
            "RMSNorm" => {
                let smallest = if scope.dtype() == DType::F64 { f64::EPSILON } else { f32::EPSILON.into() };
                let eps = self.init.float_or("eps", smallest);
                self.one(nn::RmsNormConfig::new(&shape()).with_eps(eps).with_affine(affine()).init(scope))
            }
            "GroupNorm" => {
                let config = nn::GroupNormConfig::new(self.size("num_groups")?, self.size("num_channels")?);
                let affine = self.init.bool_or("affine", true);
                self.one(config.with_eps(self.eps("eps")).with_affine(affine).init(scope))
            }
            "Embedding" => {
                let config =
                    nn::EmbeddingConfig::new(self.size("num_embeddings")?, self.size("embedding_dim")?);
                let padding = self.init.int("padding_idx");
                self.one(padding.map_or(config, |row| config.with_padding(row as isize)).init(scope))
            }
            _ => self.conv2d(),
        }
    }

    fn conv2d(&self) -> Result<Vec<Var>> {
        if self.init.str_or("padding_mode", "zeros") != "zeros" {
            self.call.refuse("init.padding_mode".into());
        }
        let (inputs, outputs) = (self.size("in_channels")?, self.size("out_channels")?);
        let options = ConvOptions {
            stride: self.pair("stride", 1)?,
            padding: self.pair("padding", 0)?,
            dilation: self.pair("dilation", 1)?,
            groups: self.init.int_or("groups", 1) as usize,
        };
        let config = nn::Conv2dConfig::new(inputs, outputs, self.pair("kernel_size", 1)?);
        self.one(config.with_options(options).with_bias(self.bias()).init(&self.scope()))
    }

    fn batch_norm(&self) -> Result<Vec<Var>> {
        let config = nn::BatchNormConfig::new(self.size("num_features")?)
            .with_eps(self.eps("eps"))
            .with_momentum(self.init.nullable("momentum", 0.1))
            .with_affine(self.init.bool_or("affine", true))
            .with_tracking(self.init.bool_or("track_running_stats", true));
        let input = self.call.var("input")?;
        self.call(config.init_2d(&self.scope()), |module| {
            let mut outputs = vec![module.forward(input)?];
            if self.training {
                let buffers = |(_, tensor): (String, _)| Var::new(tensor);
                let state = nn::state_dict(module).into_iter();
                outputs.extend(state.filter(|(name, _)| name != "weight" && name != "bias").map(buffers));
            }
            Ok(outputs)
        })
    }

    fn attention(&self) -> Result<Vec<Var>> {
        self.only("batch_first", true, false);
        let query = self.call.var("query")?;
        let key = self.call.opt("key").unwrap_or(query);
        let value = self.call.opt("value").unwrap_or(key);
        let hidden =
            nn::AttentionMasks { mask: self.call.opt("attn_mask"), keys: self.call.opt("key_padding_mask") };
        let config = nn::MultiheadAttentionConfig::new(self.size("embed_dim")?, self.size("num_heads")?)
            .with_bias(self.bias())
            .with_dropout(self.init.float_or("dropout", 0.0));
        let average = self.forward.bool_or("average_attn_weights", true);
        let need_weights = self.forward.bool_or("need_weights", true);
        self.call(config.init(&self.scope()), |module| {
            if !need_weights {
                return Ok(vec![module.forward(query, key, value, hidden)?]);
            }
            let (y, weights) = module.forward_with_weights(query, key, value, hidden)?;
            Ok(vec![y, if average { weights.mean(&[1], false)? } else { weights }])
        })
    }

    fn encoder_layer(&self) -> Result<Vec<Var>> {
        self.only("batch_first", true, false);
        let activation = match self.init.str_or("activation", "relu") {
            "relu" => nn::models::Activation::Relu,
            "gelu" => nn::models::Activation::Gelu,
            other => return Err(self.call.refuse(format!("init.activation = {other}"))),
        };
        let config = nn::TransformerEncoderLayerConfig {
            inner: self.init.int_or("dim_feedforward", 2048) as usize,
            dropout: self.init.float_or("dropout", 0.1),
            activation,
            eps: self.eps("layer_norm_eps"),
            norm_first: self.init.bool_or("norm_first", false),
            bias: self.bias(),
            ..nn::TransformerEncoderLayerConfig::new(self.size("d_model")?, self.size("nhead")?)
        };
        let keys = self.call.opt("src_key_padding_mask");
        let hidden = nn::AttentionMasks { mask: self.call.opt("src_mask"), keys };
        let src = self.call.var("src")?;
        self.call(config.init(&self.scope()), |module| Ok(vec![module.forward_masked(src, hidden)?]))
    }

    fn recurrent(&self) -> Result<nn::RecurrentConfig> {
        self.only("batch_first", true, false);
        self.only("bidirectional", false, false);
        if self.init.float_or("dropout", 0.0) != 0.0 || self.init.int_or("proj_size", 0) != 0 {
            self.call.refuse("init.dropout or init.proj_size".into());
        }
        let layers = self.init.int_or("num_layers", 1) as usize;
        let config = nn::RecurrentConfig::new(self.size("input_size")?, self.size("hidden_size")?);
        Ok(config.with_layers(layers).with_bias(self.bias()))
    }

    fn lstm(&self) -> Result<Vec<Var>> {
        let states = (self.call.opt("h_0"), self.call.opt("c_0"));
        let input = self.call.var("input")?;
        self.call(self.recurrent()?.init_lstm(&self.scope()), |module| {
            let made = module.forward(input, states.0, states.1)?;
            Ok(vec![made.output, made.hidden, made.cell])
        })
    }

    fn gru(&self) -> Result<Vec<Var>> {
        let (input, hidden) = (self.call.var("input")?, self.call.opt("h_0"));
        self.call(self.recurrent()?.init_gru(&self.scope()), |module| {
            let (output, hidden) = module.forward(input, hidden)?;
            Ok(vec![output, hidden])
        })
    }
}
