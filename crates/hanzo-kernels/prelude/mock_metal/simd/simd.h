// Empty: what SPIRV-Cross includes.
