"""The reference that Doxygen makes of the headers: all is documented, and nothing of what the headers say is lost.

Exits with 77, which ctest shows as skipped, where there is no Doxygen.
"""

import argparse
import html
import pathlib
import re
import shutil
import subprocess
import sys

skipped = 77


def words(text):
    return re.findall(r"\w+", text)


class Reference:
    def __init__(self, arguments):
        self.__dict__.update(vars(arguments))
        self.include = pathlib.Path(self.include)

    def doxygen(self, name, include):
        """Runs Doxygen over a folder of headers: what it complains of, and the folder with what it wrote."""
        folder = pathlib.Path(self.work) / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        settings = folder / "Doxyfile"
        settings.write_text(f"@INCLUDE = {self.doxyfile}\nINPUT = {include}\nOUTPUT_DIRECTORY = {folder}\nGENERATE_HTML = NO\n")
        done = subprocess.run([self.doxygen_command, settings], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not done.returncode and done.stdout:
            sys.exit(f"Doxygen succeeds, but says:\n{done.stdout}")
        return (done.stdout or "it fails without a word") if done.returncode else "", folder

    # ---- What ctest runs

    def rendered(self):
        """Doxygen has nothing to complain of, and each comment of each header stands in what it wrote, word by word."""
        complaints, folder = self.doxygen("rendered", self.include)
        if complaints:
            sys.exit(f"Doxygen does not render the headers without a warning:\n{complaints}")
        pages = [html.unescape(re.sub(r"<[^>]*>", " ", file.read_text())) for file in sorted((folder / "xml").glob("*.xml"))]
        shown = " ".join(words(" ".join(pages)))
        count = 0
        for header in sorted(self.include.glob("*.h")):
            for comment in re.findall(r"/\*(.*?)\*/", header.read_text(), re.DOTALL):
                for paragraph in re.split(r"\n \*\n|-{9,}", comment):
                    count += 1
                    if " ".join(words(paragraph)) not in shown:
                        sys.exit(f"{header.name}: Doxygen does not show this comment:\n{paragraph}")
        if not count:
            sys.exit(f"There are no comments to be shown in {self.include}.")
        print(f"{count} paragraphs of the headers' comments are shown, without a warning.")

    def complains(self):
        """What has no comment is named, whatever it is: else the test above would prove little."""
        header = (self.include / "mha.h").read_text()
        for name, above, undocumented in (
                ("mha_undocumented", "/* Frees a layer", "MHA_API void mha_undocumented(void);\n\n"),
                ("MHA_UNDOCUMENTED", "/* A rotation. ", "#define MHA_UNDOCUMENTED 3u\n\n"),
                ("mha_undocumented", "/* How a call would run",
                 "typedef struct mha_undocumented {\n  int a; /* a */\n} mha_undocumented;\n\n"),
                ("undocumented_field", "} mha_rope_config;", "  double undocumented_field;\n")):
            if header.count(above) != 1:
                sys.exit(f"mha.h has {header.count(above)} times \"{above}\"; this test puts something without a comment above it.")
            changed = pathlib.Path(self.work) / "changed"
            shutil.rmtree(changed, ignore_errors=True)
            changed.mkdir(parents=True)
            (changed / "mha.h").write_text(header.replace(above, undocumented + above))
            complaints, _ = self.doxygen("complains", changed)
            if name not in complaints:
                sys.exit(f"Doxygen does not complain of {name}, which has no comment. It says: {complaints or 'nothing'}")
            print(complaints.splitlines()[0])


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("test", help="rendered or complains")
parser.add_argument("--doxygen", dest="doxygen_command", required=True)
parser.add_argument("--doxyfile", required=True, help="the settings of the target doc")
parser.add_argument("--include", required=True, help="the folder of the headers")
parser.add_argument("--work", required=True, help="the folder to work in")
arguments = parser.parse_args()
if not shutil.which(arguments.doxygen_command):
    print("skipped: doxygen is not there. On Debian: apt-get install doxygen, then configure anew")
    sys.exit(skipped)
getattr(Reference(arguments), arguments.test)()
