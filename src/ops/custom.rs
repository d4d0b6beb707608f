//! Operations of our own on GPUs, in burn's queue: in order with burn's operations, and as lazy as they are.

use burn::backend::fusion::FusionRuntime;
use burn::backend::fusion::custom::{
    CustomOpIr, HandleContainer, OperationFn, OperationIr, StreamId, TensorIr, TensorSpec,
};
use burn::backend::fusion::{FusionBackend, FusionTensor};
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn::tensor::{DType, Shape};
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
    let inputs = inputs.map(fused);
    let client = inputs[0].0.client.clone();
    let is_float = outputs.each_ref().map(|spec| spec.dtype.is_float());
    let inputs = inputs.map(|(tensor, is_float)| (tensor.into_ir(), is_float));
    let created = outputs.map(|spec| TensorIr::uninit(client.create_empty_handle(), spec.shape, spec.dtype));
    let description = CustomOpIr {
        id: name.into(),
        inputs: inputs.iter().map(|(input, _)| input.clone()).collect(),
        outputs: created.to_vec(),
        scalars: Vec::new(),
    };
    let work = move |handles: &mut Handles| {
        let inputs = inputs.each_ref().map(|(input, is_float)| match is_float {
            true => handles.get_float_tensor::<CubeBackend>(input),
            false => handles.get_int_tensor::<CubeBackend>(input),
        });
        let (client, device) = (inputs[0].client.clone(), inputs[0].device.clone());
        let outputs = created.each_ref().map(|output| {
            empty_device_contiguous_dtype(client.clone(), device.clone(), output.shape.clone(), output.dtype)
        });
        run(inputs, &outputs);
        for ((output, created), is_float) in outputs.into_iter().zip(&created).zip(is_float) {
            if is_float {
                handles.register_float_tensor::<CubeBackend>(&created.id, output);
            } else {
                handles.register_int_tensor::<CubeBackend>(&created.id, output);
            }
        }
        Ok(())
    };
    let queued = client.register(StreamId::current(), OperationIr::Custom(description), OperationFn(work));
    let mut queued = queued.into_iter().zip(is_float);
    std::array::from_fn(|_| {
        let Some((tensor, is_float)) = queued.next() else { unreachable!("burn returns what was described") };
        let tensor = if is_float { BackendTensor::Float(tensor) } else { BackendTensor::Int(tensor) };
        DispatchTensor { kind: DispatchTensorKind::Cube(tensor), autodiff: DispatchAutodiffContext::Disabled }
    })
}

/// A tensor as burn's queue knows it, and whether it holds floating-point numbers.
fn fused(tensor: DispatchTensor) -> (FusionTensor<Runtime>, bool) {
    match tensor.kind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor)) => (tensor, true),
        DispatchTensorKind::Cube(BackendTensor::Int(tensor)) => (tensor, false),
        _ => panic!("an operation of a GPU takes tensors on it"),
    }
}
