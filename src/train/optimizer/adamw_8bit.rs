//! `AdamW` whose moments are codes of eight bits with a scale for each block (Dettmers et al., 2022), as bitsandbytes has it.

use burn::tensor::Tensor;

use super::states::StateForm;
use super::{Parameter, State, Update, adamw};
use crate::config::OptimizerConfig;
use crate::ops::adamw_8bit::{self, BLOCK_LEN, Coded};
use crate::ops::kernels::Place;

/// Parameters with fewer numbers keep their moments in `f32`.
const LEAST: usize = 4096;

/// Codes and scales of both moments, or for a small parameter the moments.
pub(super) fn states(shape: [usize; 2]) -> Vec<StateForm> {
    let size: usize = shape.iter().product();
    if size < LEAST {
        return adamw::states(shape);
    }
    let scales = [1, size.div_ceil(BLOCK_LEN)];
    vec![
        StateForm::codes("state1", shape),
        StateForm::zeros("absmax1", scales),
        StateForm::codes("state2", shape),
        StateForm::zeros("absmax2", scales),
    ]
}

pub(super) fn update(
    place: Place,
    config: &OptimizerConfig,
    parameters: Vec<(Parameter, &Tensor<2>)>,
    update: Update,
    factor: Option<&Tensor<1>>,
) -> Vec<Parameter> {
    let of_kernels = adamw::of_kernels(config, update);
    let one = |(Parameter { values, states }, grad)| match <[State; 4]>::try_from(states) {
        Ok([State::Codes(m), State::Numbers(m_scales), State::Codes(v), State::Numbers(v_scales)]) => {
            let state = Coded { parameter: values, codes: [m, v], scales: [m_scales, v_scales] };
            let Coded { parameter, codes: [m, v], scales: [m_scales, v_scales] } =
                adamw_8bit::adamw_8bit(place, state, grad, &of_kernels, factor);
            let codes_and_scales =
                [State::Codes(m), State::Numbers(m_scales), State::Codes(v), State::Numbers(v_scales)];
            vec![Parameter { values: parameter, states: codes_and_scales.into() }]
        }
        Ok(_) => unreachable!("as the forms say"),
        Err(states) => adamw::update(place, config, vec![(Parameter { values, states }, grad)], update, factor),
    };
    parameters.into_iter().flat_map(one).collect()
}
