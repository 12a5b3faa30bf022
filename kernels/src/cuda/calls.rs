//! Functions of NVIDIA's libraries, called in the very library that [`super::libraries`] has found.
//!
//! Of `cudarc`, only types and constants are used. Its functions look for a library themselves, by
//! names without a version first, so that a toolkit's copy in the loader's path would win over
//! `--cuda-lib-dir`; and they panic if there is none.
//!
//! Statuses are numbers here, not `cudarc`'s enumerations: a later driver can return some that
//! those do not have.
pub(super) mod cublaslt;
pub(super) mod driver;

/// Status of a call: a `CUresult` or a `cublasStatus_t`.
pub(super) type Status = u32;

/// Declares functions, and how they are found in a library. They return `absent` if none was.
macro_rules! functions {
    (
        absent: $absent:literal;
        $(fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*
    ) => {
        use libloading::os::unix::Library;

        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> $result,)*
            /// Keeps the functions alive.
            _library: Library,
        }

        static FOUND: std::sync::OnceLock<Functions> = std::sync::OnceLock::new();

        /// Names of all functions, in order.
        #[cfg(test)]
        pub(in crate::cuda) const NAMES: &[&str] = &[$(stringify!($name)),*];

        /// Whether the functions have been found.
        pub(in crate::cuda) fn is_found() -> bool {
            FOUND.get().is_some()
        }

        /// Uses the functions of this library from now on; the first one stays.
        ///
        /// # Errors
        /// Names of functions that it lacks.
        pub(in crate::cuda) fn resolve(library: Library) -> Result<(), Vec<&'static str>> {
            let mut lacking = Vec::new();
            $(
                // SAFETY: every library that has the function has it with this signature.
                let found = unsafe {
                    library.get::<unsafe extern "C" fn($($type),*) -> $result>(
                        stringify!($name).as_bytes(),
                    )
                };
                let $name = found.map(|found| *found);
                if $name.is_err() {
                    lacking.push(stringify!($name));
                }
            )*
            match ($($name,)*) {
                ($(Ok($name),)*) => {
                    let _ = FOUND.set(Functions { $($name,)* _library: library });
                    Ok(())
                }
                _ => Err(lacking),
            }
        }

        $(
            /// NVIDIA's function of this name.
            ///
            /// # Safety
            /// As NVIDIA documents it.
            #[allow(clippy::too_many_arguments, reason = "NVIDIA's")]
            pub(in crate::cuda) unsafe fn $name($($argument: $type),*) -> $result {
                match FOUND.get() {
                    // SAFETY: this function's contract.
                    Some(found) => unsafe { (found.$name)($($argument),*) },
                    None => <$result>::from($absent),
                }
            }
        )*
    };
}
use functions;
