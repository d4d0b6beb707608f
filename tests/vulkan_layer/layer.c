// A Vulkan layer that mends shaders of cubecl-spirv 0.11.3: for drivers without VK_KHR_workgroup_memory_explicit_layout it
// declares a variable in shared memory as a pointer to a pointer (`lower_shared_implicit` swaps two types). Mesa 22.3 crashes.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vk_layer.h>

enum { TYPE_POINTER = 32, VARIABLE = 59, WORKGROUP = 4, HEADER = 5 };

// The driver's functions: the program has one instance at a time that counts, and one device.
static PFN_vkGetInstanceProcAddr next_instance;
static PFN_vkGetDeviceProcAddr next_device;
static PFN_vkCreateShaderModule next_create;

static void mend(uint32_t *code, size_t words) {
    uint32_t bound = code[3], *pointee = calloc(bound, sizeof *pointee);
    for (size_t at = HEADER; at < words; at += code[at] >> 16) {
        uint32_t *op = code + at;
        if ((op[0] & 0xffff) == TYPE_POINTER && op[2] == WORKGROUP) pointee[op[1]] = op[3];
        if ((op[0] & 0xffff) == VARIABLE && op[3] == WORKGROUP && pointee[pointee[op[1]]]) op[1] = pointee[op[1]];
    }
    free(pointee);
}

static VkResult create_shader(VkDevice device, const VkShaderModuleCreateInfo *info, const VkAllocationCallbacks *allocator,
                              VkShaderModule *module) {
    VkShaderModuleCreateInfo mended = *info;
    uint32_t *code = malloc(info->codeSize);
    mended.pCode = memcpy(code, info->pCode, info->codeSize);
    mend(code, info->codeSize / sizeof *code);
    VkResult result = next_create(device, &mended, allocator, module);
    free(code);
    return result;
}

static VkLayerInstanceCreateInfo *instance_link(const VkInstanceCreateInfo *info) {
    VkLayerInstanceCreateInfo *link = (void *)info->pNext;
    while (link->sType != VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO)
        link = (void *)link->pNext;
    return link;
}

static VkResult create_instance(const VkInstanceCreateInfo *info, const VkAllocationCallbacks *allocator, VkInstance *instance) {
    VkLayerInstanceCreateInfo *link = instance_link(info);
    next_instance = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    return ((PFN_vkCreateInstance)next_instance(NULL, "vkCreateInstance"))(info, allocator, instance);
}

static VkResult create_device(VkPhysicalDevice card, const VkDeviceCreateInfo *info, const VkAllocationCallbacks *allocator,
                              VkDevice *device) {
    VkLayerDeviceCreateInfo *link = (void *)info->pNext;
    while (link->sType != VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO)
        link = (void *)link->pNext;
    PFN_vkGetInstanceProcAddr get = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    next_device = link->u.pLayerInfo->pfnNextGetDeviceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    VkResult result = ((PFN_vkCreateDevice)get(NULL, "vkCreateDevice"))(card, info, allocator, device);
    if (result == VK_SUCCESS) next_create = (PFN_vkCreateShaderModule)next_device(*device, "vkCreateShaderModule");
    return result;
}

static PFN_vkVoidFunction device_function(VkDevice device, const char *name) {
    if (!strcmp(name, "vkGetDeviceProcAddr")) return (PFN_vkVoidFunction)device_function;
    if (!strcmp(name, "vkCreateShaderModule")) return (PFN_vkVoidFunction)create_shader;
    return next_device(device, name);
}

static PFN_vkVoidFunction instance_function(VkInstance instance, const char *name) {
    if (!strcmp(name, "vkGetInstanceProcAddr")) return (PFN_vkVoidFunction)instance_function;
    if (!strcmp(name, "vkGetDeviceProcAddr")) return (PFN_vkVoidFunction)device_function;
    if (!strcmp(name, "vkCreateInstance")) return (PFN_vkVoidFunction)create_instance;
    if (!strcmp(name, "vkCreateDevice")) return (PFN_vkVoidFunction)create_device;
    return next_instance ? next_instance(instance, name) : NULL;
}

VkResult vkNegotiateLoaderLayerInterfaceVersion(VkNegotiateLayerInterface *negotiated) {
    negotiated->loaderLayerInterfaceVersion = 2;
    negotiated->pfnGetInstanceProcAddr = instance_function;
    negotiated->pfnGetDeviceProcAddr = device_function;
    negotiated->pfnGetPhysicalDeviceProcAddr = NULL;
    return VK_SUCCESS;
}
