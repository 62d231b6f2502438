//! The Vulkan loader, one instance, and what the validation layer says. Devices are in `device`.

use super::error::{failed, unsupported};
use crate::error::Result;
use ash::{ext, khr, vk};
use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, PoisonError};

const VALIDATION: &CStr = c"VK_LAYER_KHRONOS_validation";

/// What the validation layer said, in order.
#[derive(Default)]
struct Messages(Mutex<Vec<String>>);

/// The loader and an instance. Nothing is linked: a system without Vulkan gets an error here and nowhere else.
pub struct Instance {
    raw: ash::Instance,
    debug: Option<(ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT)>,
    messages: Arc<Messages>,
    /// Keeps the library loaded.
    pub(super) entry: ash::Entry,
}

impl Instance {
    /// Loads Vulkan, with the validation layer if asked for.
    ///
    /// # Errors
    /// If there is no loader, or it is older than Vulkan 1.3, or the layer is not installed.
    pub fn new(validate: bool) -> Result<Arc<Instance>> {
        // SAFETY: the system's Vulkan loader is trusted, as any dynamically linked library is.
        let entry = unsafe { ash::Entry::load() }.map_err(|e| {
            unsupported(format!(
                "there is no Vulkan loader on this system ({e}); install it with a driver (Debian: libvulkan1 and \
                 mesa-vulkan-drivers), or use --device cpu"
            ))
        })?;
        // SAFETY: plain query.
        let version = unsafe { entry.try_enumerate_instance_version() }.map_err(failed("tell its version"))?;
        if version.is_none_or(|v| v < vk::API_VERSION_1_3) {
            return Err(unsupported("the Vulkan loader is older than 1.3; update it".into()));
        }
        // SAFETY: plain query.
        let have = unsafe { entry.enumerate_instance_extension_properties(None) }.map_err(failed("list extensions"))?;
        let have = |name: &CStr| have.iter().any(|e| e.extension_name_as_c_str() == Ok(name));
        let mut extensions = Vec::new();
        let mut flags = vk::InstanceCreateFlags::empty();
        if have(khr::portability_enumeration::NAME) {
            extensions.push(khr::portability_enumeration::NAME.as_ptr());
            flags |= vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR;
        }
        let mut layers = Vec::new();
        if validate {
            // SAFETY: plain query.
            let found = unsafe { entry.enumerate_instance_layer_properties() }.map_err(failed("list layers"))?;
            if !found.iter().any(|l| l.layer_name_as_c_str() == Ok(VALIDATION)) {
                return Err(unsupported(
                    "HANZO_VK_VALIDATE needs the Khronos validation layer (Debian: vulkan-validationlayers)".into(),
                ));
            }
            layers.push(VALIDATION.as_ptr());
            extensions.push(ext::debug_utils::NAME.as_ptr());
        }
        let messages = Arc::new(Messages::default());
        let mut messenger = messenger(&messages);
        let checks = [vk::ValidationFeatureEnableEXT::SYNCHRONIZATION_VALIDATION];
        let mut checks = vk::ValidationFeaturesEXT::default().enabled_validation_features(&checks);
        let app = vk::ApplicationInfo::default()
            .application_name(c"hanzo")
            .engine_name(c"hanzo")
            .api_version(vk::API_VERSION_1_3);
        let mut info = vk::InstanceCreateInfo::default()
            .flags(flags)
            .application_info(&app)
            .enabled_layer_names(&layers)
            .enabled_extension_names(&extensions);
        if validate {
            info = info.push_next(&mut messenger).push_next(&mut checks);
        }
        // SAFETY: every pointer in `info` outlives the call.
        let raw = unsafe { entry.create_instance(&info, None) }.map_err(|r| match r {
            vk::Result::ERROR_INCOMPATIBLE_DRIVER => {
                unsupported("no Vulkan driver is installed (Debian: mesa-vulkan-drivers); or use --device cpu".into())
            }
            r => failed("create an instance")(r),
        })?;
        let mut instance = Instance { raw, debug: None, messages, entry };
        if validate {
            let debug = ext::debug_utils::Instance::new(&instance.entry, &instance.raw);
            let info = self::messenger(&instance.messages);
            // SAFETY: the messenger is destroyed before `messages`, which its user data points to.
            let handle =
                unsafe { debug.create_debug_utils_messenger(&info, None) }.map_err(failed("report validation"))?;
            instance.debug = Some((debug, handle));
        }
        Ok(Arc::new(instance))
    }

    /// The instance's functions.
    pub(super) fn raw(&self) -> &ash::Instance {
        &self.raw
    }

    /// What the validation layer says, to be asked for after the instance is gone.
    #[cfg(test)]
    pub(super) fn messages(&self) -> impl Fn() -> Vec<String> + use<> {
        let messages = Arc::clone(&self.messages);
        move || messages.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What the validation layer has said so far, taken out.
    pub fn take_messages(&self) -> Vec<String> {
        std::mem::take(&mut *self.messages.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: devices hold an `Arc` of this, so none is left; the messenger goes before its instance.
        unsafe {
            if let Some((debug, handle)) = self.debug.take() {
                debug.destroy_debug_utils_messenger(handle, None);
            }
            self.raw.destroy_instance(None);
        }
    }
}

fn messenger(messages: &Arc<Messages>) -> vk::DebugUtilsMessengerCreateInfoEXT<'static> {
    use vk::{DebugUtilsMessageSeverityFlagsEXT as Severity, DebugUtilsMessageTypeFlagsEXT as Type};
    vk::DebugUtilsMessengerCreateInfoEXT::default()
        .message_severity(Severity::WARNING | Severity::ERROR)
        .message_type(Type::VALIDATION)
        .pfn_user_callback(Some(on_message))
        .user_data(Arc::as_ptr(messages).cast::<c_void>().cast_mut())
}

/// Called by the layer, on any thread.
unsafe extern "system" fn on_message(
    _severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    _kind: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    user: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: `user` is the `Messages` of the instance, which outlives its messengers; `data` is valid during the call.
    let (messages, text) = unsafe {
        let text = (*data).message_as_c_str().map_or("".into(), |t| t.to_string_lossy().into_owned());
        (&*user.cast::<Messages>(), text)
    };
    messages.0.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    vk::FALSE
}
