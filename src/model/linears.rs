//! The linear layers of a block, each with the adapter of its tokens.

use std::ops::Range;

use burn::tensor::Tensor;

use super::context::{BlockBackward, BlockContext};
use crate::lora::kind::AdapterKind;
use crate::lora::matrices::Applied;
use crate::lora::{Adapter, BlockAdapters};
use crate::ops::dropout::{Dropout, mix};
use crate::ops::linear::{
    InputGrad, Layer, Weight, linear, linear_backward, linears, linears_backward, low_rank_input,
};
use crate::spec::{PerSite, Projections, SiteId};

/// The linear layers of a block in one of its passes, and what its backward gives.
pub(super) struct Linears<'a> {
    weights: &'a [Weight],
    pub(super) context: &'a BlockContext<'a>,
    adapters: &'a BlockAdapters,
    /// What an adapter's backward needs of its forward.
    pub(super) kept: PerSite<Tensor<2>>,
    /// What the backward has made so far.
    pub(super) grads: BlockBackward,
}

impl<'a> Linears<'a> {
    /// Before a pass; a backward takes what its forward has kept.
    pub(super) fn new(weights: &'a [Weight], context: &'a BlockContext<'a>, kept: PerSite<Tensor<2>>) -> Self {
        Self { weights, context, adapters: context.adapters, kept, grads: BlockBackward::default() }
    }

    /// Whether a linear layer has an adapter that is trained.
    pub(super) fn is_adapted(&self, site: SiteId) -> bool {
        self.adapters.contains_key(&site)
    }

    /// The adapters of experts, by the layers of the first.
    pub(super) fn of_experts(&self) -> PerSite<&'a Adapter> {
        let of_experts = self.adapters.iter().filter(|(_, adapter)| adapter.num_experts.is_some());
        of_experts.map(|(site, adapter)| (*site, adapter)).collect()
    }

    /// Makes the linear layers of an expert, which have these adapters.
    pub(super) fn with<'b>(&self) -> impl Fn(&'b BlockAdapters) -> Linears<'b> + use<'a, 'b>
    where
        'a: 'b,
    {
        let (weights, context) = (self.weights, self.context);
        move |adapters| Linears { adapters, ..Linears::new(weights, context, PerSite::new()) }
    }

    fn adapter(&self, site: SiteId) -> Option<(AdapterKind, Applied<'a>)> {
        let adapter = self.adapters.get(&site)?;
        let dropout = self.context.dropout.map(|dropout| Dropout { seed: mix(dropout.seed ^ site as u64), ..dropout });
        Some((adapter.kind, adapter.applied(dropout)))
    }

    /// The matrix and bias of a linear layer, without its adapter.
    pub(super) fn weight(&self, site: SiteId) -> &'a Weight {
        &self.weights[site]
    }

    /// The bias of a linear layer, `[out_features]` in `f32`.
    pub(super) fn bias(&self, site: SiteId) -> Option<Tensor<1>> {
        self.weights[site].bias.clone()
    }

    /// The output of a linear layer, added to `residual` if there is one.
    pub(super) fn forward(&mut self, site: SiteId, x: &Tensor<2>, residual: Option<Tensor<2>>) -> Tensor<2> {
        let (place, weight) = (self.context.place(), &self.weights[site]);
        let (y, kept) = match self.adapter(site) {
            Some((kind, adapter)) => kind.forward(place, x, weight, adapter, residual),
            None => linear(place, x, weight, None, residual),
        };
        self.finished(site, x, y, kept)
    }

    /// The output of a linear layer for some of the tokens, which have equally many rows each; nothing is kept for a backward.
    pub(super) fn forward_rows(&self, site: SiteId, x: &Tensor<2>, tokens: Range<usize>) -> Tensor<2> {
        let (place, weight) = (self.context.place(), &self.weights[site]);
        let y = match self.adapter(site) {
            Some((kind, adapter)) => kind.forward(place, x, weight, adapter, None).0,
            None => linear(place, x, weight, None, None).0,
        };
        let add = |y, (rows, adapter): (Range<usize>, &Adapter)| {
            adapter.kind.add(place, y, x, weight, adapter.applied(None), rows)
        };
        self.of_rows(site, tokens, x.dims()[0]).fold(y, add)
    }

    /// The product with a linear layer's transposed matrix, its adapter in it, likewise.
    pub(super) fn transposed_rows(&self, site: SiteId, y: &Tensor<2>, tokens: Range<usize>) -> Tensor<2> {
        let (place, weight) = (self.context.place(), &self.weights[site]);
        // The gradient of an input, which is that of any.
        let by = |y: &Tensor<2>, adapter: Option<(AdapterKind, Applied<'_>)>| {
            let x = Tensor::zeros([y.dims()[0], weight.dims()[1]], (&y.device(), y.dtype()));
            let dx = match adapter {
                Some((kind, adapter)) => kind.backward(place, y, &x, weight, (adapter, None), InputGrad::Fresh).0,
                None => linear_backward(place, y, &x, weight, None, InputGrad::Fresh).0,
            };
            dx.unwrap_or(x)
        };
        let x = by(y, self.adapter(site));
        let put = |x: Tensor<2>, (rows, adapter): (Range<usize>, &Adapter)| {
            let (part, width) = (y.clone().narrow(0, rows.start, rows.len()), x.dims()[1]);
            x.slice_assign([rows, 0..width], by(&part, Some((adapter.kind, adapter.applied(None)))))
        };
        self.of_rows(site, tokens, y.dims()[0]).fold(x, put)
    }

    /// The adapters that a layer has by rows, of which some of the tokens have `num_rows`.
    fn of_rows(
        &self,
        site: SiteId,
        tokens: Range<usize>,
        num_rows: usize,
    ) -> impl Iterator<Item = (Range<usize>, &'a Adapter)> + use<'a> {
        let of_token = num_rows / tokens.len().max(1);
        self.context.by_rows.iter().filter_map(move |(rows, adapters)| {
            let [start, end] = [rows.start, rows.end].map(|row| row.clamp(tokens.start, tokens.end) - tokens.start);
            let adapter = adapters.get(&site).filter(|_| start < end)?;
            Some((start * of_token..end * of_token, adapter))
        })
    }

    /// The outputs of projections of one input.
    pub(super) fn project<const N: usize>(&mut self, projections: Projections<N>, x: &Tensor<2>) -> [Tensor<2>; N] {
        match projections {
            Projections::Apart(sites) => self.forward_each(sites, x),
            Projections::Fused { site, widths } => {
                let (y, mut first) = (self.forward(site, x, None), 0);
                widths.map(|width| {
                    first += width;
                    y.clone().narrow(1, first - width, width)
                })
            }
            Projections::Same(site) => {
                let y = self.forward(site, x, None);
                std::array::from_fn(|_| y.clone())
            }
        }
    }

    /// The gradient of the input `x` of projections, if `input_grad`.
    pub(super) fn project_backward<const N: usize>(
        &mut self,
        projections: Projections<N>,
        dys: [Tensor<2>; N],
        x: &Tensor<2>,
        input_grad: bool,
    ) -> Option<Tensor<2>> {
        match projections {
            Projections::Apart(sites) => self.backward_each(sites, dys, x, input_grad),
            Projections::Fused { site, .. } => {
                self.backward(site, &Tensor::cat(dys.into(), 1), x, InputGrad::of(input_grad, None))
            }
            Projections::Same(site) => {
                let dy = dys.into_iter().reduce(|sum, dy| sum + dy)?;
                self.backward(site, &dy, x, InputGrad::of(input_grad, None))
            }
        }
    }

    /// The outputs of several linear layers of one input.
    fn forward_each<const N: usize>(&mut self, sites: [SiteId; N], x: &Tensor<2>) -> [Tensor<2>; N] {
        let Some(layers) = self.layers(sites) else { return sites.map(|site| self.forward(site, x, None)) };
        let mut outputs = linears(self.context.place(), x, &layers).into_iter();
        sites.map(|site| {
            let Some((y, kept)) = outputs.next() else { unreachable!("each layer has an output") };
            self.finished(site, x, y, kept)
        })
    }

    /// The layers of `sites`, if all can be computed together.
    fn layers<const N: usize>(&self, sites: [SiteId; N]) -> Option<Vec<Layer<'a>>> {
        let layer = |site: SiteId| {
            let weight = &self.weights[site];
            match self.adapter(site) {
                Some((kind, adapter)) => kind.layer(weight, adapter),
                None => Some(Layer { weight, lora: None }),
            }
        };
        sites.into_iter().map(layer).collect()
    }

    /// The output `y` of a layer, with the adapters of some of the rows.
    fn finished(&mut self, site: SiteId, x: &Tensor<2>, y: Tensor<2>, kept: Option<Tensor<2>>) -> Tensor<2> {
        let (place, weight) = (self.context.place(), &self.weights[site]);
        self.context.watch.iter().for_each(|watch| watch.see(site, x));
        self.kept.extend(kept.map(|kept| (site, kept)));
        let add = |y, (rows, adapter): (Range<usize>, &Adapter)| {
            adapter.kind.add(place, y, x, weight, adapter.applied(None), rows)
        };
        self.of_rows(site, 0..x.dims()[0], x.dims()[0]).fold(y, add)
    }

    /// The gradient of a linear layer's input `x`, as `input_grad` asks. What the forward did not keep is computed anew.
    pub(super) fn backward(
        &mut self,
        site: SiteId,
        dy: &Tensor<2>,
        x: &Tensor<2>,
        input_grad: InputGrad,
    ) -> Option<Tensor<2>> {
        let place = self.context.place();
        let weight = &self.weights[site];
        let (dx, grad) = match self.adapter(site) {
            Some((kind, adapter)) => {
                kind.backward(place, dy, x, weight, (adapter, self.kept.remove(&site)), input_grad)
            }
            None => (linear_backward(place, dy, x, weight, None, input_grad).0, None),
        };
        self.grads.adapters.extend(grad.map(|grad| (site, grad)));
        dx
    }

    /// The sum of the gradients of the input `x` of several linear layers, if `input_grad`. The gradients of their outputs are
    /// dropped as soon as they are used.
    fn backward_each<const N: usize>(
        &mut self,
        sites: [SiteId; N],
        dys: [Tensor<2>; N],
        x: &Tensor<2>,
        input_grad: bool,
    ) -> Option<Tensor<2>> {
        let Some(layers) = self.layers(sites) else {
            let each =
                |sum, (site, dy): (SiteId, Tensor<2>)| self.backward(site, &dy, x, InputGrad::of(input_grad, sum));
            return sites.into_iter().zip(dys).fold(None, each);
        };
        let place = self.context.place();
        let kept: Vec<_> = sites
            .iter()
            .zip(&layers)
            .map(|(site, layer)| {
                let again = || layer.lora.map(|lora| low_rank_input(place, x, lora));
                self.kept.remove(site).or_else(again)
            })
            .collect();
        let layers: Vec<_> = layers.into_iter().zip(kept.iter().map(Option::as_ref)).collect();
        let (dx, grads) = linears_backward(place, dys.into(), x, &layers, input_grad);
        let grads = sites.into_iter().zip(grads).filter_map(|(site, grad)| Some((site, grad?.into())));
        self.grads.adapters.extend(grads);
        dx
    }
}
