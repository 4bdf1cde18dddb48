from conan import ConanFile
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, get, rmdir


class Mha(ConanFile):
    name = "mha"
    version = "@VERSION@"
    description = "Multi-head attention for CPUs, behind a C interface"
    homepage = "@HOMEPAGE@"
    license = "MIT"
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False]}
    default_options = {"shared": False}

    def layout(self):
        cmake_layout(self)

    def requirements(self):
        self.requires("xsimd/[>=8.1]", visible=False)  # its headers, for compiling alone

    def source(self):
        get(self, "@URL@", sha256="@SHA256@", strip_root=True)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for part in ("OPENBLAS", "PTHREADPOOL", "ONNX", "TOOLS", "BENCH", "TESTS"):
            toolchain.cache_variables[f"MHA_{part}"] = "OFF"
        toolchain.cache_variables["MHA_SHARED"] = bool(self.options.shared)
        toolchain.cache_variables["MHA_STATIC"] = not self.options.shared
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, f"{self.package_folder}/licenses")
        for folder in ("lib/cmake", "lib/pkgconfig", "share"):  # Conan writes those of its packages
            rmdir(self, f"{self.package_folder}/{folder}")

    def package_info(self):
        self.cpp_info.libs = ["mha"]
        if self.options.shared and self.settings.os == "Windows":
            self.cpp_info.defines = ["MHA_SHARED"]
