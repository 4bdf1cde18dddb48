class Mha < Formula
  desc "Multi-head attention for CPUs, behind a C interface"
  homepage "@HOMEPAGE@"
  url "@URL@"
  sha256 "@SHA256@"
  license "MIT"

  depends_on "cli11" => :build
  depends_on "cmake" => :build
  depends_on "ninja" => :build # make as Homebrew wraps it drops -O2 and -march from each kernel's options
  depends_on "nlohmann-json" => :build
  depends_on "xsimd" => :build

  def install
    off = %w[OPENBLAS PTHREADPOOL ONNX BENCH TESTS].map { |part| "-DMHA_#{part}=OFF" }
    system "cmake", "-S", ".", "-B", "build", "-G", "Ninja", "-DMHA_TOOLS=ON", *off, *std_cmake_args
    system "cmake", "--build", "build"
    system "cmake", "--install", "build"
    pkgshare.install "tests/examples/minimal.c"
  end

  test do
    system ENV.cc, pkgshare/"minimal.c", "-I#{include}", "-L#{lib}", "-lmha", "-o", "minimal"
    assert_match "y[3] =  0.1602 -0.2338 ...", shell_output("./minimal")
    assert_match version.to_s, shell_output("#{bin}/mha --version")
  end
end
