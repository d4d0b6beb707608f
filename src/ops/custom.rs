//! Operations of our own on GPUs, in burn's queue: in order with burn's operations, and as lazy as they are.

use burn::backend::fusion::FusionRuntime;
use burn::backend::fusion::custom::{
    CustomOpIr, HandleContainer, OperationFn, OperationIr, StreamId, TensorIr, TensorSpec,
};
use burn::backend::fusion::{FusionBackend, FusionTensor};
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

type Runtime = <CubeBackend as FusionBackend>::FusionRuntime;
type Handles = HandleContainer<<Runtime as FusionRuntime>::FusionHandle>;

/// The type and shape of a tensor.
pub(super) fn spec(dtype: DType, shape: impl Into<Shape>) -> TensorSpec {
    TensorSpec::new(shape.into(), dtype)
}

/// The GPU of a tensor; `None` for one in host memory.
pub(super) fn device_of(tensor: &DispatchTensor) -> Option<CubeDevice> {
    match &tensor.kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor) | BackendTensor::Int(tensor)) => {
            Some(tensor.client.device().clone())
        }
        _ => None,
    }
}

/// A result of an operation.
pub(super) enum Output {
    /// A new tensor.
    New(TensorSpec),
    /// The input of this number, with other values.
    Changed(usize),
}

/// Queues an operation: `run` gets the inputs, and contiguous tensors for the outputs, without values, to fill.
///
/// It is called when burn comes to it, on a thread of burn's. Inputs are as burn left them: views and rows with gaps, too.
///
/// # Panics
/// If a tensor is not on a GPU, or autodiff tracks it.
pub(super) fn custom<const N: usize, const M: usize>(
    name: &'static str,
    inputs: [DispatchTensor; N],
    outputs: [TensorSpec; M],
    run: impl Fn([CubeTensor; N], &[CubeTensor; M]) + Send + Sync + 'static,
) -> [DispatchTensor; M] {
    let outputs = outputs.map(Output::New).into();
    array(queue(name, inputs.into(), outputs, move |inputs, outputs| run(array(inputs), reference(outputs))))
}

/// Queues an operation that gives `changed` other values, in place where nothing else uses them: `run` gets them contiguous.
///
/// # Panics
/// As [`custom`].
pub(super) fn change<const N: usize, const M: usize>(
    name: &'static str,
    changed: [DispatchTensor; M],
    inputs: [DispatchTensor; N],
    run: impl Fn(&[CubeTensor; M], [CubeTensor; N]) + Send + Sync + 'static,
) -> [DispatchTensor; M] {
    let outputs = (0..M).map(Output::Changed).collect();
    let inputs = changed.into_iter().chain(inputs).collect();
    array(queue(name, inputs, outputs, move |inputs, outputs| run(reference(outputs), array(inputs))))
}

/// Queues an operation: `run` gets the inputs that are not changed, and the outputs.
///
/// # Panics
/// As [`custom`].
pub(super) fn queue(
    name: &'static str,
    inputs: Vec<DispatchTensor>,
    outputs: Vec<Output>,
    run: impl Fn(Vec<CubeTensor>, &[CubeTensor]) + Send + Sync + 'static,
) -> Vec<DispatchTensor> {
    let (inputs, is_float): (Vec<_>, Vec<_>) = inputs.into_iter().map(fused).unzip();
    let client = inputs[0].client.clone();
    let written = |output: Output| {
        let (spec, changed) = match output {
            Output::New(spec) => (spec, None),
            Output::Changed(index) => (spec(inputs[index].dtype, inputs[index].shape.clone()), Some(index)),
        };
        (TensorIr::uninit(client.create_empty_handle(), spec.shape, spec.dtype), changed)
    };
    let outputs: Vec<_> = outputs.into_iter().map(written).collect();
    let inputs: Vec<_> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let created = outputs.iter().map(|(output, _)| output.clone()).collect();
    let (id, scalars) = (name.into(), Vec::new());
    let description = CustomOpIr { id, inputs: inputs.clone(), outputs: created, scalars };
    let work = move |handles: &mut Handles| {
        let get = |(input, is_float): (&TensorIr, &bool)| match is_float {
            true => handles.get_float_tensor::<CubeBackend>(input),
            false => handles.get_int_tensor::<CubeBackend>(input),
        };
        let mut inputs: Vec<_> = inputs.iter().zip(&is_float).map(get).map(Some).collect();
        let Some((client, device)) = inputs.iter().flatten().next().map(|x| (x.client.clone(), x.device.clone()))
        else {
            return Ok(());
        };
        let written = |(output, changed): &(TensorIr, Option<usize>)| match changed
            .and_then(|index| inputs[index].take())
        {
            None => empty_device_contiguous_dtype(client.clone(), device.clone(), output.shape.clone(), output.dtype),
            Some(tensor) => {
                let tensor = into_contiguous(tensor);
                if tensor.can_mut() { tensor } else { into_contiguous(tensor.copy()) }
            }
        };
        let results: Vec<_> = outputs.iter().map(written).collect();
        run(inputs.into_iter().flatten().collect(), &results);
        for ((output, _), result) in outputs.iter().zip(results) {
            if output.dtype.is_float() {
                handles.register_float_tensor::<CubeBackend>(&output.id, result);
            } else {
                handles.register_int_tensor::<CubeBackend>(&output.id, result);
            }
        }
        Ok(())
    };
    let queued = client.register(StreamId::current(), OperationIr::Custom(description), OperationFn(work));
    let wrapped = queued.into_iter().map(|tensor| {
        let tensor = if tensor.dtype.is_float() { BackendTensor::Float(tensor) } else { BackendTensor::Int(tensor) };
        DispatchTensor { kind: DispatchTensorKind::Cube(tensor), autodiff: DispatchAutodiffContext::Disabled }
    });
    wrapped.collect()
}

fn array<T, const N: usize>(all: Vec<T>) -> [T; N] {
    all.try_into().unwrap_or_else(|_| unreachable!("as many as were asked for"))
}

fn reference<const N: usize>(all: &[CubeTensor]) -> &[CubeTensor; N] {
    all.try_into().unwrap_or_else(|_| unreachable!("as many as were asked for"))
}

/// A tensor as burn's queue knows it, and whether it holds floating-point numbers.
fn fused(tensor: DispatchTensor) -> (FusionTensor<Runtime>, bool) {
    match tensor.kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor)) => (tensor, true),
        DispatchTensorKind::Cube(BackendTensor::Int(tensor)) => (tensor, false),
        _ => panic!("an operation of a GPU takes tensors on it"),
    }
}
